// Parts of several views: facts, meters, the table of volumes, charts with the choice of their time.

import { get } from "./api.js";
import { RANGES, Samples } from "./charts.js";
import { bytes, clock, el, micros, percent, perSecond, say } from "./format.js";
import { copyStateOf, hrefOf, nameOf, setHrefOf, shortSetNameOf, stateOf } from "./names.js";

/** Facts by name; values are text, or an element. */
export class Facts {
  constructor(names, large = false) {
    this.values = Object.fromEntries(names.map((n) => [n, el("dd")]));
    this.element = el("dl", { class: large ? "facts large" : "facts" },
      names.map((n) => el("div", {}, el("dt", {}, n), this.values[n])));
  }

  set(name, value, plain = false) {
    const place = this.values[name];
    place.classList.toggle("plain", plain);
    if (value instanceof Node) {
      if (place.firstChild?.textContent !== value.textContent || place.firstChild?.href !== value.href) place.replaceChildren(value);
    } else say(place, String(value ?? "–"));
  }
}

export function chip(element, [kind, text]) {
  element.className = `chip ${kind}`;
  say(element, text);
}

class Meter {
  constructor(...names) {
    this.parts = Object.fromEntries(names.map((n) => [n, el("i", { class: n })]));
    this.element = el("div", { class: "meter", role: "img" }, Object.values(this.parts));
  }

  set(shares, words) {
    for (const [name, share] of Object.entries(shares)) this.parts[name].style.width = `${Math.max(0, Math.min(100, share * 100))}%`;
    this.element.setAttribute("aria-label", words);
  }
}

/** Hits per hundred reads in the last five minutes. */
export const hits = (figures) => {
  const v = figures.stats.five_minute;
  return v.cache_hits + v.cache_misses ? (100 * v.cache_hits) / (v.cache_hits + v.cache_misses) : null;
};

/** How far something has come. */
export class Progress {
  constructor() {
    this.done = el("i", { class: "done" });
    this.element = el("div", { class: "meter", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 }, this.done);
  }

  set(percentage, words) {
    this.done.style.width = `${percentage}%`;
    this.element.setAttribute("aria-valuenow", Math.floor(percentage));
    this.element.setAttribute("aria-label", words);
  }
}

/** How a set's cache device is filled. */
export class Space {
  constructor() {
    this.meter = new Meter("dirty", "clean");
    this.words = el("p", { class: "small quiet num" });
    this.element = el("div", {}, this.meter.element, this.words);
  }

  set(set) {
    const all = set.bucket_bytes * set.nbuckets || 1;
    const clean = Math.max(0, set.cached_bytes - set.dirty_bytes);
    const words = `${bytes(set.dirty_bytes)} dirty and ${bytes(clean)} clean data of ${bytes(all)}; ${set.in_use_percent} % of the buckets cannot be reused at once`;
    this.meter.set({ dirty: set.dirty_bytes / all, clean: clean / all }, words);
    say(this.words, words);
  }
}

/** Requests per second of each volume, from two answers. */
export class Speeds {
  constructor() {
    this.before = new Map();
  }

  of(volumes) {
    const now = performance.now();
    return new Map(volumes.map((v) => {
      const total = v.requests.reads + v.requests.writes + v.requests.discards;
      const before = this.before.get(v.name);
      this.before.set(v.name, { now, total });
      return [v.name, before && now > before.now ? Math.max(0, ((total - before.total) * 1000) / (now - before.now)) : null];
    }));
  }
}

/** Columns of volumes: the title, the value of a volume of a set, and whether it is a number. */
const COLUMNS = [
  ["Volume", (v) => el("a", { href: hrefOf(v) }, nameOf(v))],
  ["State", (v, { set }) => el("span", { class: `chip ${stateOf(v, set)[0]}` }, stateOf(v, set)[1])],
  ["Mode", (v) => (v.attached && !v.flash_only ? v.cache_mode : "–")],
  ["Size", (v) => bytes(v.size_bytes), true],
  ["Dirty", (v) => bytes(v.dirty_bytes), true],
  ["Hits, 5 min", (v) => percent(hits(v)), true],
  ["Reads, p99", (v, { latency }) => micros(latency.read_p99_us), true],
  ["Writes, p99", (v, { latency }) => micros(latency.write_p99_us), true],
  ["Requests", (v, { speed }) => perSecond(speed), true],
];

const setLink = (set, status) => (set ? el("a", { href: setHrefOf(set) }, shortSetNameOf(set, status.devices)) : "none");

/** The roles of the sets of a group for a volume. */
const ROLES = [
  ["Copies", (v) => (v.copy ? el("span", { class: `chip ${copyStateOf(v.copy)[0]}` }, copyStateOf(v.copy)[1]) : "–")],
  ["Primary set", (v, { set, status }) => setLink(set, status)],
  ["Secondary set", (v, { status }) => (v.copy ? setLink(status.sets.find((s) => s.id === v.copy.second_set), status) : "–")],
];

/** The volumes of one set in a table, or with their `roles` those of a group: those with a problem first, then by name. */
export class VolumeTable {
  constructor(roles = false) {
    // The mode and the size make room for the roles; they are on the page of the volume.
    this.columns = roles ? [...COLUMNS.slice(0, 2), ...ROLES, ...COLUMNS.slice(4)] : COLUMNS;
    this.rows = el("tbody");
    const head = this.columns.map(([t, , right]) => el("th", { class: right ? "right" : "", scope: "col" }, t));
    this.element = el("table", { class: roles ? "cards volumes roles" : "cards volumes" }, el("thead", {}, el("tr", {}, head)), this.rows);
  }

  /** `speeds` are requests a second and `latencies` those of the last minute, each by the volume's name. */
  set(sets, status, speeds, latencies = {}) {
    const all = sets.flatMap((set) => set.volumes.map((v) => [v, set]));
    this.element.hidden = !all.length;
    const bad = (v, set) => (stateOf(v, set)[0] === "bad" ? 0 : 1);
    const sorted = all.sort(([a, x], [b, y]) => bad(a, x) - bad(b, y) || nameOf(a).localeCompare(nameOf(b), undefined, { numeric: true }));
    const focused = this.rows.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    this.rows.replaceChildren(...sorted.map(([v, set]) => {
      const more = { set, status, latency: latencies[v.name] ?? {}, speed: speeds?.get(v.name) };
      return el("tr", {}, this.columns.map(([name, value, right], n) => el("td", { class: right ? "right" : n ? "" : "whole", "data-name": n ? name : null }, value(v, more))));
    }));
    if (focused) this.rows.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  }
}

/** The damaged dirty data of a set, or of the volume with this slot; hidden without any. */
export class DamagedData {
  constructor() {
    this.rows = el("tbody");
    this.next = el("p", { class: "small" });
    this.element = el("section", { class: "card", "aria-label": "Damaged dirty data", hidden: true }, el("header", {}, el("h2", {}, "Damaged dirty data")),
      el("p", { class: "quiet small" }, "It does not match its checksum, and no other device has it. Reads of it fail until it is overwritten, accepted or dropped; see the page bit-rot of the guide."),
      el("table", { class: "cards" }, el("thead", {}, el("tr", {}, ["Volume", "Sectors", "Size"].map((t) => el("th", { class: t === "Size" ? "right" : "", scope: "col" }, t)))), this.rows), this.next);
  }

  /** `of` is what the command names: the set or the volume. */
  set(set, of, slot = null) {
    const damaged = (set?.checksums?.damaged ?? []).filter((d) => slot == null || d.slot === slot);
    const now = JSON.stringify([damaged, of]);
    if (now === this.shown) return;
    this.shown = now;
    this.element.hidden = !damaged.length;
    this.rows.replaceChildren(...damaged.map((d) => el("tr", {},
      el("td", { class: "whole" }, d.registered ? d.volume : `${d.volume} (of the device, which is not registered)`),
      el("td", { class: "mono num", "data-name": "Sectors" }, `${d.sector}+${d.sectors}`),
      el("td", { class: "right", "data-name": "Size" }, bytes(d.sectors * 512)))));
    const [first] = damaged;
    if (!first) return;
    const range = `${first.sector}+${first.sectors}`;
    this.next.replaceChildren(el("code", {}, `ubcache damaged ${of}`), " lists all of it. ", el("code", {}, `ubcache damaged ${of} accept --range ${range}`), " accepts the damaged bytes, ",
      el("code", {}, `ubcache damaged ${of} drop --range ${range} --yes`), " drops them.");
  }
}

export const line = (label, column, colour, more = {}) => ({ label, column, colour, ...more });

/** Charts of samples over one axis of time, with the choice how far back it goes. */
export class Charted {
  constructor(path, charts) {
    this.path = path;
    this.charts = charts;
    this.samples = new Samples();
    this.seconds = RANGES.map(([s]) => s).find((s) => s === Number(sessionStorage.getItem("ubcache-range"))) ?? 600;
    this.range = el("div", { class: "segments", role: "group", "aria-label": "Displayed time" }, RANGES.map(([seconds, text]) =>
      el("button", { type: "button", "aria-pressed": String(seconds === this.seconds), onclick: (e) => this.choose(seconds, e.target) }, text)));
    this.grid = el("div", { class: "charts" }, charts.map((c) => c.element));
    this.end_s = Date.now() / 1000;
    // The legends have the values of one moment, which is said once for all charts.
    this.when = el("span", { class: "quiet small num grow" });
    if (charts[0]) charts[0].onmoment = (s, latest) => say(this.when, latest ? "" : `values at ${clock(s * 1000)}`);
  }

  choose(seconds, button) {
    this.seconds = seconds;
    sessionStorage.setItem("ubcache-range", seconds);
    for (const b of this.range.children) b.setAttribute("aria-pressed", String(b === button));
    this.draw();
    this.onchoose?.();
  }

  /** The begin and the end of the axis, in seconds since 1970 by the clock of the host. */
  get between() {
    return [this.end_s - this.seconds, this.end_s];
  }

  async tick() {
    const { since } = this.samples;
    const answer = await get(`${this.path}/history?since_ms=${since}`);
    // The clock of the host was set back.
    if (answer.now_ms < since) this.samples = new Samples();
    else this.samples.add(answer.columns, since);
    this.end_s = answer.now_ms / 1000;
    this.draw();
    return answer;
  }

  draw() {
    // An answer may come when another view is shown.
    if (this.ended) return;
    for (const c of this.charts) c.draw(this.samples.columns, ...this.between);
  }

  end() {
    this.ended = true;
    for (const c of this.charts) c.end();
  }
}
