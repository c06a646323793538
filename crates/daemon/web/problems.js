// What needs an operator: found in the facts of the status answer, the worst first. Must not know how it is repaired.

import { bytes, count, el, say } from "./format.js";
import { deviceNameOf, disabled, failsWithCache, hrefOf, nameOf, named, setHrefOf, setNameOf, titleOf, tunableOf } from "./names.js";

/** Ranks of problems: data that cannot be reached comes first, then requests that fail, then what only waits. */
const RANK = { dirtyWaits: 0, setFailed: 1, dirtyMissing: 2, volumeFailed: 3, deviceFailed: 4, jobFailed: 5, waits: 6, stands: 7 };

function ofDevices(status, failedSets) {
  const found = [];
  for (const device of status.devices) {
    const name = deviceNameOf(device);
    if (device.state === "waiting" && device.dirty) {
      const cache = status.devices.find((d) => d.kind === "cache" && d.set === device.set);
      found.push({ rank: RANK.dirtyWaits, kind: "bad", register: cache?.path ?? "", action: "Register its cache…", title: `${name} waits, with dirty data`,
        text: `Its newest data is on its cache device, so it is not served without that. ${device.path}: ${device.why ?? "waits"}.` });
    } else if (device.state === "waiting") {
      found.push({ rank: RANK.waits, kind: "warn", register: device.path, title: `${name} waits`, text: `${device.path}: ${device.why ?? "waits"}.` });
    } else if (device.state === "failed" && !failedSets.has(device.set ?? device.uuid)) {
      const why = device.why ?? "failed";
      found.push({ rank: RANK.deviceFailed, kind: "bad", register: device.path, title: `${name} has failed`,
        text: why.includes(device.path) ? `${why}.` : `${device.path}: ${why}.` });
    }
  }
  return found;
}

/** Which volumes fail with their cache, and what there is to do. */
function whatFails(set) {
  if (!set.set?.failed) return "";
  const names = set.volumes.filter(failsWithCache).map(nameOf);
  const said = names.length ? `Requests to ${names.slice(0, 5).join(", ")}${names.length > 5 ? ` and ${names.length - 5} more` : ""} fail: their newest data is on the cache device. ` : "";
  return `${said}What the device still holds is not lost: check it, then register it again after “ubcache unregister”.`;
}

function ofSet(set, status) {
  const name = set.has_cache ? setNameOf(set, status.devices) : "a volume without a cache";
  const href = set.has_cache ? setHrefOf(set) : "#/";
  const found = [];
  const why = set.set?.failed ?? set.why;
  if (set.set?.failed || set.state === "failed") {
    found.push({ rank: RANK.setFailed, kind: "bad", href, title: `${name} has failed`, text: `${why ?? "It is not served"}. ${whatFails(set)}` });
  } else if (why) {
    found.push({ rank: RANK.setFailed, kind: "bad", href, title: `${name} does not answer`, text: `${why}.` });
  }
  const slots = new Set(set.volumes.map((v) => v.slot));
  const missing = (set.set?.dirty_by_slot ?? []).filter((s) => s.dirty_bytes > 0 && !slots.has(s.slot));
  if (missing.length) {
    const sum = missing.reduce((n, s) => n + s.dirty_bytes, 0);
    found.push({ rank: RANK.dirtyMissing, kind: "bad", href, title: `${name} has dirty data of a device that is not served`,
      text: `${bytes(sum)} cannot be written back until ${missing.length === 1 ? "the backing device is" : `${missing.length} backing devices are`} registered.` });
  }
  if (set.set && disabled(set.set)) {
    found.push({ rank: RANK.setFailed, kind: "bad", href, title: `${name} is disabled`, text: "Every request fails: io_disable is 1." });
  }
  return found.concat(set.volumes.flatMap(ofVolume));
}

function ofVolume(volume) {
  const found = [];
  const add = (rank, kind, title, text) => found.push({ rank, kind, href: hrefOf(volume), title: `${nameOf(volume)} ${title}`, text });
  if (volume.problem) add(RANK.volumeFailed, "bad", "is not exported", `${volume.problem}.`);
  if (disabled(volume)) add(RANK.volumeFailed, "bad", "is disabled", "Every request fails: io_disable is 1.");
  else if (volume.io_errors) {
    add(RANK.volumeFailed, "bad", "has errors", `${count(volume.io_errors)} request${volume.io_errors === 1 ? "" : "s"} to ${volume.backing_device ?? "its device"} failed; all requests fail from ${tunableOf(volume, "io_error_limit")} on.`);
  }
  if (volume.attached && volume.state === "inconsistent") {
    add(RANK.volumeFailed, "bad", "was used without its cache", "Its cached data is out of date and is dropped at the next start with the cache.");
  }
  if (volume.dirty_bytes > 0 && !volume.flash_only && tunableOf(volume, "writeback_running") === "0") {
    add(RANK.stands, "warn", "is not written back", `${bytes(volume.dirty_bytes)} are dirty and writeback_running is 0.`);
  }
  return found;
}

/** What the daemon alone knows: a state that cannot be stored, a label of two volumes. */
function ofDaemon(status) {
  const titles = { state_not_stored: "The state cannot be stored", state_not_writable: "The state directory cannot be written", label_shared: "Two volumes have one label" };
  return (status.problems ?? []).filter((p) => titles[p.kind]).map((p) => ({
    rank: RANK.waits, kind: "warn", href: "#/", title: titles[p.kind], text: `${p.text}. Next: ${p.command}.`,
  }));
}

/** Failed jobs, unless a later job of the same kind and target has succeeded or runs. */
function ofJobs(jobs, status) {
  const last = new Map(jobs.map((job) => [`${job.kind} ${job.target}`, job]));
  return [...last.values()].filter((job) => job.state === "failed").map((job) => ({
    rank: RANK.jobFailed, kind: "bad", href: "#/", title: `${job.kind} of ${titleOf(job.target, status)} failed`, text: job.error ? `${job.error}.` : "",
  }));
}

/** Every problem, the worst first: `{rank, kind, title, text}` with `href`, or with the path to `register` and its `action`. */
export function problemsOf(status, jobs = []) {
  const failedSets = new Set(status.sets.filter((s) => s.state === "failed" || s.set?.failed).map((s) => s.id));
  const all = [...ofDevices(status, failedSets), ...status.sets.flatMap((s) => ofSet(s, status)), ...ofDaemon(status), ...ofJobs(jobs, status)];
  return all.map((p) => ({ ...p, text: named(p.text, status).replace(/\.\.$/, ".") })).sort((a, b) => a.rank - b.rank);
}

export const problemCount = (n) => (n === 0 ? "No problems" : n === 1 ? "1 problem" : `${n} problems`);

/** The list of problems. `register` asks whether a path is to be registered. */
export class Problems {
  constructor(register) {
    this.register = register;
    this.heading = el("h2", {});
    this.list = el("ul", { class: "problems" });
    this.element = el("section", { class: "card", "aria-label": "Problems", hidden: true }, el("header", {}, this.heading), this.list);
  }

  set(problems) {
    const shown = JSON.stringify(problems);
    if (shown === this.shown) return;
    this.shown = shown;
    this.element.classList.toggle("alarm", problems.some((p) => p.kind === "bad"));
    this.element.hidden = !problems.length;
    say(this.heading, problemCount(problems.length));
    this.list.replaceChildren(...problems.map((p) => el("li", { class: p.kind },
      el("div", { class: "grow" }, el("h3", {}, p.href && p.href !== "#/" ? el("a", { href: p.href }, p.title) : p.title), el("p", { class: "small" }, p.text)),
      p.register != null && el("button", { type: "button", "aria-label": `${p.action ?? "Register…"} (${p.title})`, onclick: () => this.register(p.register) }, p.action ?? "Register…"))));
  }
}
