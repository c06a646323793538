// Changes of tunables and modes: what they mean for data. Asks by the dialog.

import { put, remove } from "./api.js";
import { confirm } from "./dialog.js";
import { bytes, duration, el, rate } from "./format.js";
import { nameOf, tunableOf } from "./names.js";

const at = encodeURIComponent;
export const pathOf = (of) => (of.set ? `v1/sets/${at(of.set.uuid)}` : `v1/volumes/${at(of.volume.name)}`);

/** How long writing back so much takes at a rate, in words. */
function takes(dirty, volume) {
  const speed = volume.writeback.rate_bytes_per_s;
  if (!dirty) return null;
  const slow = speed > 0 ? `at the current rate of ${rate(speed)} this takes about ${duration(dirty / speed)}; ` : "";
  return `${slow}“Drain…” writes as fast as the devices allow`;
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
      if (tunableOf(volume, "writeback_running") === "0") said.push("writeback_running is 0: nothing is written back until it is 1.");
    } else {
      said.push("Nothing is dirty: the backing device has all data.");
    }
  }
  said.push("No client is disconnected. The mode is stored in the superblock: it holds after a restart, and for the kernel's driver, too.");
  return said;
}

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

/** Another cache mode. */
export function changeMode(volume) {
  const choices = volume.tunables.find((t) => t.key === "cache_mode")?.choices ?? [];
  const pick = el("select", { id: "mode" }, choices.map((c) => el("option", { value: c, selected: c === volume.cache_mode }, c)));
  return confirm({
    title: `Cache mode of ${nameOf(volume)}`,
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
  const name = of.volume ? nameOf(of.volume) : "the cache set";
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
