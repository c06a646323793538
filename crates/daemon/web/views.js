// What the page shows of one thing: the host, a set, a volume. Each view makes its elements once and then only changes them.

import { get } from "./api.js";
import { changeMode, changeTunable, collectGarbage, detach, pathOf, resetTunable, writeBack } from "./changes.js";
import { Chart, Samples, hitRatio } from "./charts.js";
import { bytes, count, el, micros, percent, rate, say } from "./format.js";
import { Buckets, DiskPicture } from "./pictures.js";

/** Seconds that charts can show. */
const RANGES = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];

/** Facts by name; values are text, or an element. */
class Facts {
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

export const nameOf = (volume) => (volume.label && volume.label !== volume.name ? `${volume.name} (${volume.label})` : volume.name);
export const hrefOf = (volume) => `#/volume/${encodeURIComponent(volume.name)}`;

export function stateOf(volume) {
  if (volume.problem) return ["bad", "not exported"];
  if (volume.flash_only) return ["info", "flash-only"];
  if (!volume.attached) return ["warn", "without a cache"];
  return volume.state === "dirty" ? ["warn", "dirty"] : volume.state === "clean" ? ["good", "clean"] : ["bad", volume.state ?? "unknown"];
}

function chip(element, [kind, text]) {
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

const hits = (figures) => {
  const v = figures.stats.five_minute;
  return v.cache_hits + v.cache_misses ? (100 * v.cache_hits) / (v.cache_hits + v.cache_misses) : null;
};

/** How a set's cache device is filled. */
class Space {
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

/** Everything of the host. */
export class Overview {
  constructor() {
    this.facts = new Facts(["Requests", "Hit ratio, 5 min", "Dirty data", "Volumes"], true);
    this.sets = el("div", { class: "stack" });
    this.devices = el("section", { class: "card", "aria-label": "Devices that are not served", hidden: true });
    this.element = el("div", { class: "stack" },
      el("h1", {}, "This host"), el("section", { class: "card", "aria-label": "In short" }, this.facts.element), this.sets, this.devices);
    this.cards = new Map();
    this.before = new Map();
  }

  title() {
    return "ubcache";
  }

  /** Requests per second of each volume, from two answers. */
  speeds(volumes) {
    const now = performance.now();
    const speeds = new Map();
    for (const v of volumes) {
      const total = v.requests.reads + v.requests.writes + v.requests.discards;
      const before = this.before.get(v.name);
      const speed = before && now > before.now ? Math.max(0, ((total - before.total) * 1000) / (now - before.now)) : null;
      speeds.set(v.name, speed);
      this.before.set(v.name, { now, total });
    }
    return speeds;
  }

  update(status) {
    const volumes = status.sets.flatMap((s) => s.volumes);
    const speeds = this.speeds(volumes);
    const known = [...speeds.values()].filter((s) => s != null);
    this.facts.set("Requests", known.length ? `${count(known.reduce((a, b) => a + b, 0))}/s` : "–");
    const sum = (of) => status.sets.filter((s) => s.set).reduce((n, s) => n + of(s.set.stats.five_minute), 0);
    const all = sum((v) => v.cache_hits + v.cache_misses);
    this.facts.set("Hit ratio, 5 min", all ? percent((100 * sum((v) => v.cache_hits)) / all) : "no reads");
    this.facts.set("Dirty data", bytes(volumes.reduce((n, v) => n + v.dirty_bytes, 0)));
    this.facts.set("Volumes", volumes.length);

    const ids = new Set(status.sets.map((s) => s.id));
    for (const [id, card] of this.cards) if (!ids.has(id)) (card.element.remove(), this.cards.delete(id));
    for (const s of status.sets) {
      if (!this.cards.has(s.id)) {
        const card = new SetCard();
        this.cards.set(s.id, card);
        this.sets.append(card.element);
      }
      this.cards.get(s.id).update(s, speeds);
    }
    if (!status.sets.length && !this.sets.firstChild) {
      this.sets.append(el("section", { class: "card" }, el("h2", {}, "Nothing is served yet"),
        el("p", {}, "Register devices: ", el("code", {}, "ubcache register /dev/fast /dev/slow"))));
    }
    const idle = status.devices.filter((d) => d.state !== "served");
    this.devices.hidden = !idle.length;
    this.devices.replaceChildren(el("h2", {}, "Devices that are not served"), el("ul", { class: "says" },
      idle.map((d) => el("li", {}, el("span", { class: "mono" }, d.path), " ", el("span", { class: `chip ${d.state === "failed" ? "bad" : "warn"}` }, d.state), " ", d.why ?? ""))));
  }

  async tick() {}
  redraw() {}
  end() {}
}

class SetCard {
  constructor() {
    this.name = el("a", {});
    this.state = el("span", { class: "chip" });
    this.where = el("span", { class: "quiet small" });
    this.why = el("p", { class: "banner bad", hidden: true });
    this.space = new Space();
    this.rows = el("tbody");
    this.table = el("table", { class: "cards" }, el("thead", {}, el("tr", {},
      ["Volume", "State", "Mode"].map((t) => el("th", {}, t)), ["Size", "Dirty", "Hits, 5 min", "Requests"].map((t) => el("th", { class: "right" }, t)))), this.rows);
    this.element = el("section", { class: "card" }, el("header", {}, el("h2", {}, this.name), this.state, this.where), this.why, this.space.element, this.table);
  }

  update(s, speeds) {
    const alone = !s.has_cache;
    say(this.name, alone ? "Served without a cache" : `Cache set ${s.id.slice(0, 8)}`);
    if (!alone) this.name.href = `#/set/${encodeURIComponent(s.id)}`;
    this.element.setAttribute("aria-label", this.name.textContent);
    chip(this.state, [s.state === "serving" ? (s.set?.failed ? "bad" : "good") : s.state === "failed" ? "bad" : "warn", s.set?.failed ? "failed" : s.state]);
    say(this.where, s.set?.device ?? "");
    const why = s.set?.failed ?? s.why;
    this.why.hidden = !why;
    say(this.why, why ?? "");
    this.space.element.hidden = !s.set;
    if (s.set) this.space.set(s.set);
    this.table.hidden = !s.volumes.length;
    volumeRows(this.rows, s.volumes, speeds);
  }
}

function volumeRows(rows, volumes, speeds) {
  const cell = (name, right, ...content) => el("td", { class: right ? "right" : name === "Volume" ? "whole" : "", "data-name": name === "Volume" ? null : name }, content);
  rows.replaceChildren(...volumes.map((v) => el("tr", {},
    cell("Volume", false, el("a", { href: hrefOf(v) }, nameOf(v))),
    cell("State", false, el("span", { class: `chip ${stateOf(v)[0]}` }, stateOf(v)[1])),
    cell("Mode", false, v.attached ? v.cache_mode : "–"),
    cell("Size", true, bytes(v.size_bytes)),
    cell("Dirty", true, bytes(v.dirty_bytes)),
    cell("Hits, 5 min", true, percent(hits(v))),
    cell("Requests", true, speeds?.get(v.name) != null ? `${count(speeds.get(v.name))}/s` : "–"))));
}

/** Charts of samples, with the choice how far back they go. */
class Charted {
  constructor(path, charts) {
    this.path = path;
    this.charts = charts;
    this.samples = new Samples(RANGES.at(-1)[0]);
    this.seconds = Number(sessionStorage.getItem("ubcache-range")) || 300;
    this.range = el("div", { class: "segments", role: "group", "aria-label": "Displayed time" }, RANGES.map(([seconds, text]) =>
      el("button", { type: "button", "aria-pressed": String(seconds === this.seconds), onclick: (e) => this.choose(seconds, e.target) }, text)));
    this.grid = el("div", { class: "charts" }, charts.map((c) => c.element));
  }

  choose(seconds, button) {
    this.seconds = seconds;
    sessionStorage.setItem("ubcache-range", seconds);
    for (const b of this.range.children) b.setAttribute("aria-pressed", String(b === button));
    this.draw();
    this.onchoose?.();
  }

  async tick() {
    const answer = await get(`${this.path}/history?since_ms=${this.samples.last}`);
    this.samples.add(answer.columns);
    this.draw();
  }

  draw() {
    // An answer may come when another view is shown.
    if (this.ended) return;
    for (const c of this.charts) c.draw(this.samples.columns, this.seconds);
  }

  end() {
    this.ended = true;
    for (const c of this.charts) c.end();
  }
}

/** Tunables with what they mean, and the means to change them. */
class Tunables {
  constructor(change) {
    this.find = el("input", { type: "search", placeholder: "find", "aria-label": "Find a tunable", oninput: () => this.filter() });
    this.only = el("input", { type: "checkbox", onchange: () => this.filter() });
    this.rows = el("tbody");
    this.change = change;
    this.element = el("section", { class: "card", "aria-label": "Tunables" },
      el("header", {}, el("h2", { class: "grow" }, "Tunables"), el("label", { class: "choose" }, this.only, "not the default"), this.find),
      el("table", { class: "tunables cards" }, el("thead", {}, el("tr", {}, ["Name", "Value", "What it does", "Change"].map((t) => el("th", { class: t === "Change" ? "right" : "" }, t)))), this.rows));
  }

  set(of, tunables) {
    const same = JSON.stringify(tunables);
    this.of = of;
    if (same === this.shown) return;
    this.shown = same;
    this.rows.replaceChildren(...tunables.map((t) => {
      const other = t.value !== t.default && t.default !== "" && t.key !== "writeback_rate";
      const shown = t.unit === "bytes" ? bytes(Number(t.value)) : t.unit === "sectors/s" ? rate(Number(t.value) * 512) : `${t.value}${t.unit ? ` ${t.unit}` : ""}`;
      return el("tr", { class: other ? "changed" : "", "data-key": t.key },
        el("td", { class: "mono" }, t.key),
        el("td", { class: "value num" }, shown || "–"),
        el("td", { class: "quiet small whole" }, t.doc, t.default === "" ? "" : ` (default ${t.default})`),
        el("td", { class: "right" },
          el("button", { type: "button", class: "link", "aria-label": `Change ${t.key}`, onclick: () => this.change(() => changeTunable(this.of, t)) }, "Change"),
          other && !t.in_superblock && el("button", { type: "button", class: "link", "aria-label": `Reset ${t.key}`, onclick: () => this.change(() => resetTunable(this.of, t)) }, "Reset")));
    }));
    this.filter();
  }

  filter() {
    const wanted = this.find.value.trim().toLowerCase();
    for (const row of this.rows.children) {
      row.hidden = (wanted && !row.textContent.toLowerCase().includes(wanted)) || (this.only.checked && !row.classList.contains("changed"));
    }
  }
}

/** One volume. */
export class VolumeView {
  constructor(name, changed) {
    this.name = name;
    this.heading = el("h1", {}, name);
    this.state = el("span", { class: "chip" });
    this.mode = el("span", { class: "chip info" });
    this.problem = el("p", { class: "banner bad", hidden: true });
    const act = (what) => async () => this.volume && (await what()) && changed();
    this.act = (what) => act(what)();
    const button = (text, what) => el("button", { type: "button", onclick: act(what) }, text);
    this.buttons = el("div", { class: "title" }, button("Change mode…", () => changeMode(this.volume)),
      button("Write back now…", () => writeBack({ volume: this.volume })), button("Detach…", () => detach(this.volume)));
    this.facts = new Facts(["Size", "Dirty", "Dirty target", "Hit ratio, 5 min", "Writeback rate", "Backing device", "Cache set", "Exports"]);
    this.why = Object.fromEntries(["writeback", "bypassed", "hits"].map((n) => [n, el("ul", { class: "says" })]));
    this.tunables = new Tunables(this.act);
    this.disk = new DiskPicture();
    const line = (label, column, colour, more = {}) => ({ label, column, colour, ...more });
    const quantiles = (op) => [line("p50", `${op}_p50_us`, "p50"), line("p95", `${op}_p95_us`, "p95"), line("p99", `${op}_p99_us`, "p99")];
    this.charted = new Charted(`v1/volumes/${encodeURIComponent(name)}`, [
      new Chart("Requests", { note: "per second", show: count, top: 10, series: [line("Reads", "reads", "read", { fill: true }), line("Writes", "writes", "write"), line("Flushes", "flushes", "flush")] }),
      new Chart("Throughput", { note: "of clients, per second", show: bytes, top: 65536, series: [line("Read", "read_bytes", "read", { fill: true }), line("Written", "written_bytes", "write")] }),
      new Chart("Latency of reads", { note: "logarithmic", show: micros, log: true, series: quantiles("read") }),
      new Chart("Latency of writes", { note: "logarithmic", show: micros, log: true, series: quantiles("write") }),
      new Chart("Hit ratio", { note: "reads, over ten seconds", show: percent, max: 102, series: [{ label: "Hits", colour: "writeback", fill: true, value: hitRatio }] }),
      new Chart("Bypassed", { note: "per second", show: count, top: 5, series: [line("Misses", "misses", "miss"), line("Bypassed reads", "bypassed_reads", "read", { dash: [5, 3] }), line("Bypassed writes", "bypassed_writes", "write", { dash: [5, 3] })] }),
      new Chart("Dirty data and its target", { show: bytes, top: 65536, series: [line("Dirty", "dirty_bytes", "dirty", { fill: true }), line("Target", "target_bytes", "target", { dash: [6, 4] })] }),
      new Chart("Writeback rate and its terms", { note: "per second", show: bytes, top: 8192, series: [line("Rate", "rate_bytes_per_s", "writeback", { width: 2 }), line("Written back", "written_back_bytes", "dirty", { fill: true }), line("Proportional", "proportional_bytes_per_s", "p50", { dash: [5, 3] }), line("Integral", "integral_bytes_per_s", "p95", { dash: [2, 3] })] }),
    ]);
    this.charted.onchoose = () => this.disk.draw(this.charted.seconds);
    const part = (title, list) => [el("h3", {}, title), list];
    this.explained = el("section", { class: "card", "aria-label": "Explanation" }, el("header", {}, el("h2", {}, "Explanation")),
      part("Writeback", this.why.writeback), part("Bypassed", this.why.bypassed), part("Hits", this.why.hits));
    this.element = el("div", { class: "stack" },
      el("div", { class: "title" }, this.heading, this.state, this.mode, el("span", { class: "grow" }), this.buttons),
      this.problem, el("section", { class: "card", "aria-label": "Facts" }, this.facts.element),
      el("div", { class: "title" }, el("h2", { class: "grow" }, "The last minutes"), this.charted.range),
      this.charted.grid, this.disk.element, this.explained, this.tunables.element);
  }

  title() {
    return `${this.volume ? nameOf(this.volume) : this.name} – ubcache`;
  }

  update(status) {
    const home = status.sets.find((s) => s.volumes.some((v) => v.name === this.name));
    const volume = home?.volumes.find((v) => v.name === this.name);
    this.problem.hidden = Boolean(volume) && !volume.problem;
    if (!volume) {
      this.volume = null;
      say(this.problem, `There is no volume ${this.name} now.`);
      return;
    }
    this.volume = volume;
    if (volume.problem) say(this.problem, volume.problem);
    say(this.heading, nameOf(volume));
    chip(this.state, stateOf(volume));
    this.mode.hidden = !volume.attached || volume.flash_only;
    say(this.mode, volume.cache_mode);
    this.buttons.hidden = !volume.attached || volume.flash_only;
    this.disk.element.hidden = volume.flash_only;
    const f = this.facts;
    f.set("Size", bytes(volume.size_bytes));
    f.set("Dirty", bytes(volume.dirty_bytes));
    f.set("Dirty target", volume.attached && !volume.flash_only ? bytes(this.charted.samples.recent("target_bytes", 1)) : "–");
    f.set("Hit ratio, 5 min", volume.attached ? percent(hits(volume)) : "–");
    f.set("Writeback rate", volume.attached && !volume.flash_only ? rate(volume.writeback.rate_bytes_per_s) : "–");
    f.set("Backing device", volume.backing_device ?? "none", true);
    f.set("Cache set", volume.attached ? el("a", { href: `#/set/${encodeURIComponent(home.id)}` }, home.id.slice(0, 8)) : "none", true);
    f.set("Exports", volume.exports.map((e) => e.address).join(", ") || "nothing", true);
    this.tunables.set({ volume }, volume.tunables);
  }

  async tick(n) {
    if (!this.volume) return;
    await this.charted.tick();
    if (!this.volume.flash_only) {
      this.disk.add(await get(`${pathOf({ volume: this.volume })}/disk-trace?since=${this.disk.next ?? 0}`));
      this.disk.draw(this.charted.seconds);
    }
    if (n % 5 === 0) {
      const said = await get(`${pathOf({ volume: this.volume })}/explain`);
      for (const [name, list] of Object.entries(this.why)) {
        const text = said[name].join("\n");
        if (list.textContent !== said[name].join("")) list.replaceChildren(...text.split("\n").map((s) => el("li", {}, s)));
      }
    }
  }

  redraw() {
    this.disk.draw();
  }

  end() {
    this.charted.end();
  }
}

/** One cache set. */
export class SetView {
  constructor(id, changed) {
    this.id = id;
    this.state = el("span", { class: "chip" });
    this.problem = el("p", { class: "banner bad", hidden: true });
    this.act = async (what) => this.set && (await what()) && changed();
    const button = (text, what) => el("button", { type: "button", onclick: () => this.act(what) }, text);
    this.buttons = el("div", { class: "title" }, button("Write back now…", () => writeBack({ set: this.set })), button("Collect garbage…", () => collectGarbage(this.set)));
    this.facts = new Facts(["Cache device", "Size", "Buckets", "Hit ratio, 5 min", "Index in memory", "Free journal", "Written to the cache", "UUID"]);
    this.space = new Space();
    this.rows = el("tbody");
    this.tunables = new Tunables(this.act);
    this.buckets = new Buckets();
    const line = (label, column, colour, more = {}) => ({ label, column, colour, ...more });
    this.charted = new Charted(`v1/sets/${encodeURIComponent(id)}`, [
      new Chart("Requests of all volumes", { note: "per second", show: count, top: 10, series: [line("Reads", "reads", "read", { fill: true }), line("Writes", "writes", "write")] }),
      new Chart("Hit ratio", { note: "reads, over ten seconds", show: percent, max: 102, series: [{ label: "Hits", colour: "writeback", fill: true, value: hitRatio }] }),
      new Chart("Requests to the cache device", { note: "per second", show: count, top: 10, series: [line("Reads", "cache_reads", "read", { fill: true }), line("Writes", "cache_writes", "write"), line("Journal", "journal_writes", "flush")] }),
      new Chart("Throughput of the cache device", { note: "per second", show: bytes, top: 65536, series: [line("Read", "cache_read_bytes", "read", { fill: true }), line("Written", "cache_written_bytes", "write")] }),
      new Chart("Latency of the cache device", { note: "p99, logarithmic", show: micros, log: true, series: [line("Reads", "cache_read_p99_us", "read"), line("Writes", "cache_write_p99_us", "write"), line("Journal", "journal_p99_us", "flush")] }),
      new Chart("Data in the cache", { show: bytes, top: 65536, series: [line("All", "cached_bytes", "clean", { fill: true }), line("Dirty", "dirty_bytes", "dirty", { fill: true })] }),
    ]);
    this.heading = el("h1", {}, `Cache set ${id.slice(0, 8)}`);
    this.element = el("div", { class: "stack" },
      el("div", { class: "title" }, this.heading, this.state, el("span", { class: "grow" }), this.buttons),
      this.problem, el("section", { class: "card", "aria-label": "Facts" }, this.facts.element, this.space.element),
      el("section", { class: "card", "aria-label": "Volumes" }, el("header", {}, el("h2", {}, "Volumes")),
        el("table", { class: "cards" }, el("thead", {}, el("tr", {}, ["Volume", "State", "Mode"].map((t) => el("th", {}, t)),
          ["Size", "Dirty", "Hits, 5 min", "Requests"].map((t) => el("th", { class: "right" }, t)))), this.rows)),
      this.buckets.element,
      el("div", { class: "title" }, el("h2", { class: "grow" }, "The last minutes"), this.charted.range),
      this.charted.grid, this.tunables.element);
    this.speeds = new Overview();
  }

  title() {
    return `Cache set ${this.id.slice(0, 8)} – ubcache`;
  }

  update(status) {
    const home = status.sets.find((s) => s.id === this.id);
    this.set = home?.set ?? null;
    const why = home ? (this.set?.failed ?? home.why) : `There is no cache set ${this.id} now.`;
    this.problem.hidden = !why;
    say(this.problem, why ?? "");
    chip(this.state, [home?.state === "serving" && !this.set?.failed ? "good" : "bad", this.set?.failed ? "failed" : (home?.state ?? "gone")]);
    if (!this.set) return;
    const s = this.set;
    const f = this.facts;
    f.set("Cache device", s.device, true);
    f.set("Size", bytes(s.bucket_bytes * s.nbuckets));
    f.set("Buckets", `${count(s.nbuckets)} of ${bytes(s.bucket_bytes)}`);
    f.set("Hit ratio, 5 min", percent(hits(s)));
    f.set("Index in memory", `${bytes(s.index_bytes)} in ${count(s.btree_nodes)} node${s.btree_nodes === 1 ? "" : "s"}`);
    f.set("Free journal", `${s.journal_buckets_free} of ${s.journal_buckets} buckets`);
    f.set("Written to the cache", bytes(s.work.written_bytes + s.work.metadata_written_bytes));
    f.set("UUID", s.uuid, true);
    this.space.set(s);
    volumeRows(this.rows, home.volumes, this.speeds.speeds(home.volumes));
    this.tunables.set({ set: s }, s.tunables);
  }

  async tick(n) {
    if (!this.set) return;
    await this.charted.tick();
    if (n % 3 === 0) this.buckets.draw(await get(`${pathOf({ set: this.set })}/buckets?cells=${this.buckets.wanted()}`));
  }

  redraw() {
    this.buckets.paint();
  }

  end() {
    this.charted.end();
  }
}
