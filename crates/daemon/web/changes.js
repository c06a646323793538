// Changing things: says what will happen, asks, does it, and says what went wrong. Knows what tunables and modes mean for data.

import { Refused, post, put, remove } from "./api.js";
import { bytes, duration, el, rate } from "./format.js";

const at = encodeURIComponent;
export const pathOf = (of) => (of.set ? `v1/sets/${at(of.set.uuid)}` : `v1/volumes/${at(of.volume.name)}`);

/** How long writing back so much takes at a rate, in words. */
function takes(dirty, volume) {
  const speed = volume.writeback.rate_bytes_per_s;
  if (!dirty) return null;
  const slow = speed > 0 ? `at the present rate of ${rate(speed)} that takes about ${duration(dirty / speed)}; ` : "";
  return `${slow}“Write back now” does it as fast as the devices can`;
}

function modeConsequences(from, to, volume) {
  const dirty = volume.dirty_bytes;
  const said = {
    writeback: [
      "Writes are answered as soon as the cache device has them, and go to the backing device later.",
      "Until then the newest data is on the cache device alone: if that device is lost, so is this data, and the file system on the volume with it.",
    ],
    writethrough: [
      "A write is answered when it is on the backing device: writes become as slow as that device is. Reads go on to be served from the cache.",
    ],
    writearound: [
      "Writes go to the backing device alone, and what the cache has of the same place is dropped. Only reads fill the cache.",
    ],
    none: [
      "Nothing new enters the cache. What is in it is still read from there; everything else goes to the backing device.",
    ],
  }[to] ?? [];
  if (from === "writeback" && to !== "writeback") {
    if (dirty) {
      said.push(`${bytes(dirty)} of dirty data stay on the cache device until they are written back, and until then the cache device is needed: ${takes(dirty, volume)}.`);
      if (tunable(volume, "writeback_running") === "0") said.push("writeback_running is 0: nothing is written back until that is changed.");
    } else {
      said.push("Nothing is dirty now: the backing device has everything.");
    }
  }
  said.push("Nobody who uses the volume is disconnected. The mode is kept in the superblock: it holds after a restart, and for the kernel's driver too.");
  return said;
}

const tunable = (whose, key) => whose.tunables.find((t) => t.key === key)?.value;

/** What some tunables do to what is there now; for others their line of description has to do. */
const MEANING = {
  writeback_running: (v, value) => value === "0"
    ? [`Nothing is written back from now on: the ${bytes(v.dirty_bytes)} that are dirty stay dirty, and what is written is added to them, until the cache has no more room for dirty data.`]
    : [`Writeback goes on: ${bytes(v.dirty_bytes)} are dirty.`],
  writeback_percent: (v, value, old) => {
    if (Number(value) === 0) return [`Dirty data (${bytes(v.dirty_bytes)} now) is written back at once and as fast as the devices can, always. Clients' reads compete with that.`];
    const target = Number(old) > 0 && v.writeback.target_bytes > 0 ? (v.writeback.target_bytes * Number(value)) / Number(old) : null;
    const said = [];
    if (target != null) {
      said.push(`About ${bytes(target)} may be dirty (${bytes(v.writeback.target_bytes)} until now); ${bytes(v.dirty_bytes)} are.`);
      if (v.dirty_bytes > target) said.push(`${bytes(v.dirty_bytes - target)} are above that: the rate of writeback rises until they are gone.`);
    }
    if (Number(value) > Number(old)) said.push("More of the newest data will be on the cache device alone, and less room is left for reads.");
    return said;
  },
  writeback_delay: (v, value) => [`After a walk through the device writeback rests for ${duration(Number(value) || 0)}: what is overwritten in that time need not be written twice.`],
  writeback_rate: (v, value) => [`Writeback goes at ${rate(Number(value) * 512)} until the next update of the rate (for good with writeback_percent=0).`],
  sequential_cutoff: (v, value) => Number(value) === 0
    ? ["Streams are cached, too, whatever their length: a backup or a copy of a large file then replaces what is in the cache."]
    : ["Requests that belong to a longer stream go past the cache (with admission=cost once the cache is full). What is cached already stays."],
  io_disable: (v, value) => (value === "1" ? ["Every request to this volume fails from now on. File systems on it become read-only or stop."] : ["Requests are served again."]),
  label: (v, value) => [`The volume can be found as “${value}”. Sections of the configuration that name the old label do not apply any more.`],
  admission: (v, value) => (value === "kernel" ? ["Thresholds alone decide what is cached (sequential_cutoff, congested_*), as in the kernel."] : ["What each device costs, as it is measured, decides what is cached."]),
  cutoff_writeback: () => ["Above this share of buckets in use only synchronous writes become dirty."],
  cache_replacement_policy: () => ["What is in the cache stays. Which data makes room for new data is decided otherwise from now on."],
  discard: (v, value) => (value === "1" ? ["The cache device is told about each bucket before it is used again. Some devices are slow at that."] : ["The cache device is not told about buckets any more."]),
  io_error_limit: (v, value) => [`The device is given up after ${value} failed requests${v.io_errors ? ` (there were ${v.io_errors})` : ""}.`],
};
const DANGEROUS = (key, value) => key === "io_disable" && value === "1";

const dialog = () => document.getElementById("ask");

/** Shows the dialog; `act` is done when it is confirmed. Resolves to whether it was done. */
function confirm({ title, body, sentences, action, danger = false, act }) {
  const box = dialog();
  const error = el("p", { class: "banner bad", role: "alert", hidden: true });
  const list = el("ul", { class: "says" });
  const tell = (some) => list.replaceChildren(...some.map((s) => el("li", {}, s)));
  const go = el("button", { type: "submit", class: danger ? "danger" : "main" }, action);
  const fields = body ? body((some, name, dangerous) => {
    tell(some);
    if (name) go.textContent = name;
    go.className = dangerous || danger ? "danger" : "main";
    go.disabled = some.length === 0;
  }) : [];
  if (sentences) tell(sentences);
  const form = el("form", { method: "dialog" },
    el("h2", { id: "ask-title" }, title), fields,
    el("div", { class: "will", "aria-live": "polite" }, el("h3", {}, "What will happen"), list),
    error,
    el("div", { class: "buttons" }, el("button", { type: "button", onclick: () => box.close("no") }, "Cancel"), go));
  box.replaceChildren(form);
  return new Promise((done) => {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      go.disabled = true;
      try {
        await act();
        box.close("yes");
      } catch (e) {
        error.textContent = e instanceof Refused ? e.message : `unexpected: ${e.message}`;
        error.hidden = false;
        go.disabled = false;
      }
    });
    box.addEventListener("close", () => done(box.returnValue === "yes"), { once: true });
    box.returnValue = "no";
    box.showModal();
    form.querySelector("select, input, button.main, button.danger")?.focus();
  });
}

/** Another cache mode. */
export function changeMode(volume) {
  const choices = volume.tunables.find((t) => t.key === "cache_mode")?.choices ?? [];
  const pick = el("select", { id: "mode" }, choices.map((c) => el("option", { value: c, selected: c === volume.cache_mode }, c)));
  return confirm({
    title: `Cache mode of ${volume.name}`,
    action: "Change mode",
    body: (tell) => {
      const changed = () => tell(pick.value === volume.cache_mode
        ? [] : modeConsequences(volume.cache_mode, pick.value, volume), `Change to ${pick.value}`);
      pick.addEventListener("change", changed);
      queueMicrotask(changed);
      return el("div", { class: "field" }, el("label", { htmlFor: "mode" }, `Mode (${volume.cache_mode} now)`), pick);
    },
    act: () => put(`${pathOf({ volume })}/cache-mode`, { mode: pick.value }),
  });
}

function inputFor(t) {
  const id = "value";
  const flag = t.range === "0 or 1";
  if (t.choices || flag) {
    const choices = t.choices ?? ["0", "1"];
    const words = flag ? { 0: "0 (off)", 1: "1 (on)" } : {};
    return el("select", { id }, choices.map((c) => el("option", { value: c, selected: c === t.value }, words[c] ?? c)));
  }
  return el("input", { id, type: "text", value: t.value, autocomplete: "off", spellcheck: false, inputMode: t.unit ? "numeric" : "text" });
}

/** Another value of a tunable. `of` is `{volume}` or `{set}`. */
export function changeTunable(of, t) {
  if (t.key === "cache_mode") return changeMode(of.volume);
  const whose = of.volume ?? of.set;
  const name = of.volume ? of.volume.name : "the cache set";
  const input = inputFor(t);
  const once = el("input", { type: "checkbox", id: "once" });
  const persistence = () => {
    if (t.in_superblock) return "It is kept in the superblock: it holds after a restart, and for the kernel's driver too.";
    if (t.key === "writeback_rate") return "It is of the moment and not kept.";
    return once.checked ? "It is forgotten at the next start of the daemon." : "It is kept, and counts more than the configuration, until it is reset.";
  };
  return confirm({
    title: `${t.key} of ${name}`,
    action: "Change",
    body: (tell) => {
      const changed = () => {
        const value = input.value.trim();
        if (value === t.value) return tell([], "Change");
        const means = MEANING[t.key]?.(whose, value, t.value) ?? [];
        tell([`${t.key} becomes ${value || "empty"} (${t.value || "empty"} now) and takes effect at once.`, ...means, persistence()],
          "Change", DANGEROUS(t.key, value));
      };
      input.addEventListener("input", changed);
      once.addEventListener("change", changed);
      queueMicrotask(changed);
      const kept = !t.in_superblock && t.key !== "writeback_rate";
      return [
        el("p", { class: "quiet small" }, `${t.doc[0].toUpperCase()}${t.doc.slice(1)}.`),
        el("div", { class: "field" }, el("label", { htmlFor: "value" }, t.unit ? `Value in ${t.unit}` : "Value"), input,
          el("span", { class: "quiet small" }, `${t.range}; the default is ${t.default || "empty"}`)),
        kept && el("label", { class: "tick" }, once, "only until the daemon is started again"),
      ];
    },
    act: () => put(`${pathOf(of)}/tunables/${at(t.key)}`, { value: input.value.trim(), runtime: once.checked }),
  });
}

/** Takes back what was set. */
export function resetTunable(of, t) {
  return confirm({
    title: `Reset ${t.key}`,
    action: "Reset",
    sentences: [
      `What was set at run time is forgotten: the value of the configuration holds again, or the default (${t.default || "empty"}); ${t.value || "empty"} holds now.`,
      "It takes effect at once, and holds after a restart.",
    ],
    act: () => remove(`${pathOf(of)}/tunables/${at(t.key)}`),
  });
}

export function writeBack(of) {
  const dirty = (of.volume ?? of.set).dirty_bytes;
  return confirm({
    title: `Write back everything of ${of.volume ? of.volume.name : "the cache set"}`,
    action: "Write back now",
    sentences: [
      `${bytes(dirty)} of dirty data are written to the backing device${of.volume ? "" : "s"} as fast as the devices can, and stay in the cache as clean data.`,
      "Clients go on meanwhile; their reads from the backing device take longer. What they write meanwhile is written back, too.",
      "It is a job with progress, and can be cancelled: what has been written back then stays so.",
    ],
    act: () => post(`${pathOf(of)}/flush`),
  });
}

export function detach(volume) {
  return confirm({
    title: `Detach ${volume.name}`,
    action: "Detach",
    danger: true,
    sentences: [
      volume.dirty_bytes
        ? `First the ${bytes(volume.dirty_bytes)} that are dirty are written back, as fast as the devices can. Until that is done it can be cancelled.`
        : "Nothing is dirty: nothing has to be written back first.",
      `Then ${volume.backing_device ?? "the backing device"} is let go: what the cache has of it is worth nothing any more, and every request goes to the backing device.`,
      "Who uses the volume notices nothing but that it is slow. `ubcache attach` brings it back to a cache, which begins empty then.",
    ],
    act: () => post(`${pathOf({ volume })}/detach`),
  });
}

export function collectGarbage(set) {
  return confirm({
    title: "Collect garbage",
    action: "Collect now",
    sentences: [
      "The index is walked through once, so that buckets nobody needs can be used again. It happens by itself, too; this does it now.",
      "No data is lost and nobody is disconnected. Requests may take a little longer for some seconds.",
    ],
    act: () => post(`${pathOf({ set })}/gc`),
  });
}

export function cancelJob(job) {
  return confirm({
    title: `Cancel ${job.kind} of ${job.target}`,
    action: "Cancel the job",
    danger: true,
    sentences: [`${job.percent} % are done; that stays done. The rest is left as it is${job.kind === "detach" ? ", and the volume stays attached" : ""}.`],
    act: () => remove(`v1/jobs/${job.id}`),
  });
}

/** Asks for the token, where the daemon wants one. */
export function askForToken(why, take) {
  const input = el("input", { type: "password", id: "token", autocomplete: "off" });
  return confirm({
    title: "Token",
    action: "Go on",
    body: () => [el("p", {}, why), el("div", { class: "field" }, el("label", { htmlFor: "token" }, "Token of this daemon"), input)],
    sentences: ["It is kept in this tab until that is closed, and sent with each request."],
    act: async () => take(input.value.trim()),
  });
}

