// Changing things: says what will happen, asks, does it, and says what went wrong. Knows what tunables and modes mean for data.

import { Refused, post, put, remove } from "./api.js";
import { bytes, duration, el, rate } from "./format.js";

const at = encodeURIComponent;
export const pathOf = (of) => (of.set ? `v1/sets/${at(of.set.uuid)}` : `v1/volumes/${at(of.volume.name)}`);

/** How long writing back so much takes at a rate, in words. */
function takes(dirty, volume) {
  const speed = volume.writeback.rate_bytes_per_s;
  if (!dirty) return null;
  const slow = speed > 0 ? `at the current rate of ${rate(speed)} this takes about ${duration(dirty / speed)}; ` : "";
  return `${slow}“Write back now” writes as fast as the devices allow`;
}

function modeConsequences(from, to, volume) {
  const dirty = volume.dirty_bytes;
  const said = {
    writeback: [
      "A write is answered when the cache device has it. It is written back to the backing device later.",
      "Until then the newest data is on the cache device alone: if the cache device is lost, this data and the file system on the volume are lost.",
    ],
    writethrough: [
      "A write is answered when it is on the backing device: writes are as slow as that device. Reads are still served from the cache.",
    ],
    writearound: [
      "Writes go to the backing device alone, and invalidate cached data of the same range. Only reads fill the cache.",
    ],
    none: [
      "No new data enters the cache. Cached data is still read from the cache; all other requests go to the backing device.",
    ],
  }[to] ?? [];
  if (from === "writeback" && to !== "writeback") {
    if (dirty) {
      said.push(`${bytes(dirty)} of dirty data stay on the cache device until they are written back. Until then the volume needs the cache device: ${takes(dirty, volume)}.`);
      if (tunable(volume, "writeback_running") === "0") said.push("writeback_running is 0: nothing is written back until it is 1.");
    } else {
      said.push("Nothing is dirty: the backing device has all data.");
    }
  }
  said.push("No client is disconnected. The mode is stored in the superblock: it holds after a restart, and for the kernel's driver, too.");
  return said;
}

const tunable = (whose, key) => whose.tunables.find((t) => t.key === key)?.value;

/** What some tunables do to what is there now; for others their line of description has to do. */
const MEANING = {
  writeback_running: (v, value) => value === "0"
    ? [`Nothing is written back from now on: ${bytes(v.dirty_bytes)} stay dirty, and new writes add dirty data until the cache has no more room for it.`]
    : [`Writeback resumes: ${bytes(v.dirty_bytes)} are dirty.`],
  writeback_percent: (v, value, old) => {
    if (Number(value) === 0) return [`Dirty data (${bytes(v.dirty_bytes)} now) is always written back at once, as fast as the devices allow. Reads of clients compete with writeback.`];
    const target = Number(old) > 0 && v.writeback.target_bytes > 0 ? (v.writeback.target_bytes * Number(value)) / Number(old) : null;
    const said = [];
    if (target != null) {
      said.push(`About ${bytes(target)} may be dirty (${bytes(v.writeback.target_bytes)} until now); ${bytes(v.dirty_bytes)} are dirty.`);
      if (v.dirty_bytes > target) said.push(`${bytes(v.dirty_bytes - target)} are above this target: the rate of writeback rises until they are written back.`);
    }
    if (Number(value) > Number(old)) said.push("More of the newest data is on the cache device alone, and less room is left for reads.");
    return said;
  },
  writeback_delay: (v, value) => [`After each pass over the device writeback pauses for ${duration(Number(value) || 0)}: data that is overwritten in this time is written back only once.`],
  writeback_rate: (v, value) => [`Writeback runs at ${rate(Number(value) * 512)} until the next update of the rate (permanently with writeback_percent=0).`],
  sequential_cutoff: (v, value) => Number(value) === 0
    ? ["Sequential streams of any length are cached: a backup or a copy of a large file evicts other data."]
    : ["Requests of longer sequential streams bypass the cache (with admission=cost only when the cache is full). Cached data stays."],
  io_disable: (v, value) => (value === "1" ? ["Every request to this volume fails from now on. File systems on it become read-only or stop."] : ["Requests are served again."]),
  label: (v, value) => [`The volume can be found as “${value}”. Sections of the configuration that name the old label no longer apply.`],
  admission: (v, value) => (value === "kernel" ? ["Thresholds alone decide what is cached (sequential_cutoff, congested_*), as in the kernel."] : ["The measured cost of requests to each device decides what is cached."]),
  cutoff_writeback: () => ["Above this share of buckets in use only synchronous writes become dirty."],
  cache_replacement_policy: () => ["Cached data stays. The new policy selects which data is evicted from now on."],
  discard: (v, value) => (value === "1" ? ["Each bucket is discarded before it is reused. Some devices discard slowly."] : ["Buckets are no longer discarded."]),
  io_error_limit: (v, value) => [`Every request to the device fails after ${value} failed requests${v.io_errors ? ` (${v.io_errors} have failed)` : ""}.`],
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
    if (t.in_superblock) return "It is stored in the superblock: it holds after a restart, and for the kernel's driver, too.";
    if (t.key === "writeback_rate") return "The value holds until the next update of the rate and is not stored.";
    return once.checked ? "It holds until the daemon starts again." : "It is stored and overrides the configuration until it is reset.";
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
        kept && el("label", { class: "tick" }, once, "only until the daemon starts again"),
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
      `The value that was set at run time (${t.value || "empty"}) is removed: the value of the configuration holds again, or the default (${t.default || "empty"}).`,
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
      `${bytes(dirty)} of dirty data are written to the backing device${of.volume ? "" : "s"} as fast as the devices allow, and stay in the cache as clean data.`,
      "Clients are served meanwhile; their reads from the backing device take longer. Data that they write meanwhile is written back, too.",
      "This is a job with progress, which can be cancelled: data that is written back until then stays clean.",
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
        ? `First the ${bytes(volume.dirty_bytes)} that are dirty are written back, as fast as the devices allow. Until this is done the job can be cancelled.`
        : "Nothing is dirty, so nothing is written back first.",
      `Then ${volume.backing_device ?? "the backing device"} is detached: its cached data is invalid from then on, and every request goes to the backing device.`,
      "No client is disconnected, but requests are slower. `ubcache attach` attaches the volume to a cache again, without cached data.",
    ],
    act: () => post(`${pathOf({ volume })}/detach`),
  });
}

export function collectGarbage(set) {
  return confirm({
    title: "Collect garbage",
    action: "Collect now",
    sentences: [
      "Garbage collection walks the index once and frees buckets without live data. It also runs by itself; this runs it now.",
      "No data is lost and no client is disconnected. Requests may take longer for some seconds.",
    ],
    act: () => post(`${pathOf({ set })}/gc`),
  });
}

export function cancelJob(job) {
  return confirm({
    title: `Cancel ${job.kind} of ${job.target}`,
    action: "Cancel the job",
    danger: true,
    sentences: [`${job.percent} % are done and stay done. The rest is not changed${job.kind === "detach" ? ", and the volume stays attached" : ""}.`],
    act: () => remove(`v1/jobs/${job.id}`),
  });
}

/** Asks for the token, where the daemon wants one. */
export function askForToken(why, take) {
  const input = el("input", { type: "password", id: "token", autocomplete: "off" });
  return confirm({
    title: "Token",
    action: "Continue",
    body: () => [el("p", {}, why), el("div", { class: "field" }, el("label", { htmlFor: "token" }, "Token of this daemon"), input)],
    sentences: ["The token is kept in this tab until it is closed, and sent with each request."],
    act: async () => take(input.value.trim()),
  });
}

