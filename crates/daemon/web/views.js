// What the page shows of one volume or one set. Each view makes its elements once and then only changes them.

import { attachVolume, collectGarbage, createVolume, detach, serveAgain, stopVolume, drain } from "./actions.js";
import { get } from "./api.js";
import { changeMode, pathOf } from "./changes.js";
import { Chart, hitRatio } from "./charts.js";
import { bytes, count, el, micros, percent, rate, say } from "./format.js";
import { nameOf, setHrefOf, setNameOf, setStateOf, stateOf, typedOf } from "./names.js";
import { CopyCard, membersOf } from "./groups.js";
import { Charted, DamagedData, Facts, Space, Speeds, VolumeTable, chip, hits, line } from "./parts.js";
import { Buckets, DiskPicture } from "./pictures.js";
import { ScrubCard } from "./scrub.js";
import { Tunables } from "./tunables.js";

const quantiles = (op) => [line("p50", `${op}_p50_us`, "p50"), line("p95", `${op}_p95_us`, "p95"), line("p99", `${op}_p99_us`, "p99")];

const volumeCharts = () => [
  new Chart("Requests", { note: "per second", show: count, top: 10, clip: true, series: [line("Reads", "reads", "read", { fill: true }), line("Writes", "writes", "write"), line("Flushes", "flushes", "flush")] }),
  new Chart("Throughput", { note: "of clients", show: rate, top: 65536, clip: true, series: [line("Read", "read_bytes", "read", { fill: true }), line("Written", "written_bytes", "write")] }),
  new Chart("Latency of reads", { note: "logarithmic", show: micros, log: true, series: quantiles("read") }),
  new Chart("Latency of writes", { note: "logarithmic", show: micros, log: true, series: quantiles("write") }),
  new Chart("Hit ratio", { note: "reads, over ten seconds", show: percent, max: 102, series: [{ label: "Hits", colour: "writeback", fill: true, value: hitRatio }] }),
  new Chart("Misses and bypassed requests", { note: "per second", show: count, top: 5, clip: true, series: [line("Misses", "misses", "miss"), line("Bypassed reads", "bypassed_reads", "read", { dash: [5, 3] }), line("Bypassed writes", "bypassed_writes", "write", { dash: [5, 3] })] }),
  new Chart("Dirty data and its target", { show: bytes, top: 65536, series: [line("Dirty", "dirty_bytes", "dirty", { fill: true }), line("Target", "target_bytes", "target", { dash: [6, 4] })] }),
  new Chart("Writeback rate and its terms", { show: rate, top: 8192, clip: true, series: [line("Rate", "rate_bytes_per_s", "writeback", { width: 2 }), line("Written back", "written_back_bytes", "dirty", { fill: true }), line("Proportional", "proportional_bytes_per_s", "p50", { dash: [5, 3] }), line("Integral", "integral_bytes_per_s", "p95", { dash: [2, 3] })] }),
  new Chart("Requests to the backing device", { note: "per second", show: count, top: 5, clip: true, series: [line("Reads", "disk_reads", "read", { fill: true }), line("Writes", "disk_writes", "write")] }),
];

/** One volume. */
export class VolumeView {
  constructor(name, changed) {
    this.name = name;
    this.heading = el("h1", {}, name);
    this.state = el("span", { class: "chip" });
    this.mode = el("span", { class: "chip" });
    this.problem = el("p", { class: "banner bad", hidden: true });
    const act = (what) => async () => this.volume && (await what()) && changed();
    this.act = (what) => act(what)();
    const button = (text, what) => el("button", { type: "button", onclick: act(what) }, text);
    this.cached = [button("Change mode…", () => changeMode(this.volume)), button("Drain…", () => drain({ volume: this.volume }, nameOf(this.volume))), button("Detach…", () => detach(this.volume))];
    this.attach = button("Attach…", () => attachVolume(this.caches, [this.volume]));
    this.stop = button("Stop…", () => stopVolume(this.volume));
    this.serve = button("Serve again…", () => serveAgain(this.volume));
    this.facts = new Facts(["Size", "Dirty", "Dirty target", "Hit ratio, 5 min", "Reads, p99", "Writes, p99", "Writeback rate", "Cache", "Name", "Backing device", "Exports"]);
    this.why = Object.fromEntries(["writeback", "bypassed", "hits"].map((n) => [n, el("ul", { class: "says" })]));
    this.tunables = new Tunables(this.act);
    this.disk = new DiskPicture();
    this.damaged = new DamagedData();
    this.copies = new CopyCard();
    this.charted = new Charted(`v1/volumes/${encodeURIComponent(name)}`, volumeCharts());
    this.charted.onchoose = () => this.disk.draw(...this.charted.between);
    const part = (title, list) => [el("h3", {}, title), list];
    this.explained = el("section", { class: "card", "aria-label": "Explanation" }, el("header", {}, el("h2", {}, "Explanation")),
      part("Writeback", this.why.writeback), part("Bypassed", this.why.bypassed), part("Hits", this.why.hits));
    this.element = el("div", { class: "stack" },
      el("div", { class: "title" }, this.heading, this.state, this.mode, el("span", { class: "grow" }), el("div", { class: "title" }, this.cached, this.attach, this.serve, this.stop)),
      this.problem, this.damaged.element, el("section", { class: "card", "aria-label": "Facts" }, this.facts.element), this.copies.element,
      el("div", { class: "title" }, el("h2", {}, "Over time"), this.charted.when, this.charted.range),
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
    chip(this.state, stateOf(volume, home));
    const cached = volume.attached && !volume.flash_only;
    this.mode.hidden = !cached;
    say(this.mode, volume.cache_mode);
    for (const button of this.cached) button.hidden = !cached;
    this.caches = status.sets.filter((s) => s.set && !s.set.failed);
    this.attach.hidden = volume.attached || volume.flash_only || !this.caches.length;
    this.stop.hidden = Boolean(volume.stopped);
    this.serve.hidden = !volume.stopped;
    this.disk.element.hidden = volume.flash_only;
    this.showFacts(volume, home, status);
    this.damaged.set(home.set, typedOf(volume.label, volume.name), volume.slot ?? -1);
    this.copies.set(volume, home, status);
    this.tunables.set({ volume }, volume.tunables);
  }

  showFacts(volume, home, status) {
    const cached = volume.attached && !volume.flash_only;
    const f = this.facts;
    f.set("Size", bytes(volume.size_bytes));
    f.set("Dirty", bytes(volume.dirty_bytes));
    f.set("Dirty target", cached ? bytes(this.charted.samples.recent("target_bytes", 1)) : "–");
    f.set("Hit ratio, 5 min", volume.attached ? percent(hits(volume)) : "–");
    f.set("Reads, p99", micros(this.charted.samples.recent("read_p99_us", 60)));
    f.set("Writes, p99", micros(this.charted.samples.recent("write_p99_us", 60)));
    f.set("Writeback rate", cached ? rate(volume.writeback.rate_bytes_per_s) : "–");
    f.set("Cache", volume.attached ? el("a", { href: setHrefOf(home) }, setNameOf(home, status.devices)) : "none");
    f.set("Name", volume.name);
    f.set("Backing device", volume.backing_device ?? "none", true);
    f.set("Exports", volume.exports.map((e) => e.address).join(", ") || "nothing", true);
  }

  async tick(n) {
    if (!this.volume) return;
    await this.charted.tick();
    if (!this.volume.flash_only) {
      this.disk.add(await get(`${pathOf({ volume: this.volume })}/disk-trace?since=${this.disk.next ?? 0}`));
      this.disk.draw(...this.charted.between);
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

const setCharts = () => [
  new Chart("Requests of all volumes", { note: "per second", show: count, top: 10, clip: true, series: [line("Reads", "reads", "read", { fill: true }), line("Writes", "writes", "write")] }),
  new Chart("Hit ratio", { note: "reads, over ten seconds", show: percent, max: 102, series: [{ label: "Hits", colour: "writeback", fill: true, value: hitRatio }] }),
  new Chart("Requests to the cache device", { note: "per second", show: count, top: 10, clip: true, series: [line("Reads", "cache_reads", "read", { fill: true }), line("Writes", "cache_writes", "write"), line("Journal", "journal_writes", "flush")] }),
  new Chart("Throughput of the cache device", { show: rate, top: 65536, clip: true, series: [line("Read", "cache_read_bytes", "read", { fill: true }), line("Written", "cache_written_bytes", "write")] }),
  new Chart("Latency of the cache device", { note: "p99, logarithmic", show: micros, log: true, series: [line("Reads", "cache_read_p99_us", "read"), line("Writes", "cache_write_p99_us", "write"), line("Journal", "journal_p99_us", "flush")] }),
  new Chart("Data in the cache", { show: bytes, top: 65536, series: [line("All", "cached_bytes", "clean", { fill: true }), line("Dirty", "dirty_bytes", "dirty", { fill: true })] }),
];

/** One cache set. */
export class SetView {
  constructor(id, changed) {
    this.id = id;
    this.state = el("span", { class: "chip" });
    this.problem = el("p", { class: "banner bad", hidden: true });
    this.act = async (what) => this.set && (await what()) && changed();
    const button = (text, what) => el("button", { type: "button", onclick: () => this.act(what) }, text);
    this.attach = button("Attach a volume…", () => attachVolume([this.home], this.free));
    this.buttons = el("div", { class: "title" }, button("Drain…", () => drain({ set: this.set }, this.shortName)), this.attach,
      button("Create a volume…", () => createVolume(this.home)), button("Collect garbage…", () => collectGarbage(this.set)));
    this.facts = new Facts(["Cache device", "Size", "Buckets", "Hit ratio, 5 min", "Index in memory", "Free journal", "Written to the cache", "UUID"]);
    this.space = new Space();
    this.table = new VolumeTable();
    this.tunables = new Tunables(this.act);
    this.buckets = new Buckets();
    this.damaged = new DamagedData();
    this.scrub = new ScrubCard();
    this.group = el("p", { class: "quiet", hidden: true });
    this.charted = new Charted(`v1/sets/${encodeURIComponent(id)}`, setCharts());
    this.shortName = `Cache ${id.slice(0, 8)}`;
    this.heading = el("h1", {}, this.shortName);
    this.element = el("div", { class: "stack" },
      el("div", { class: "title" }, this.heading, this.state, el("span", { class: "grow" }), this.buttons),
      this.problem, this.group, this.damaged.element, el("section", { class: "card", "aria-label": "Facts" }, this.facts.element, this.space.element),
      el("section", { class: "card", "aria-label": "Volumes" }, el("header", {}, el("h2", {}, "Volumes")), this.table.element),
      this.scrub.element,
      this.buckets.element,
      el("div", { class: "title" }, el("h2", {}, "Over time"), this.charted.when, this.charted.range),
      this.charted.grid, this.tunables.element);
    this.speeds = new Speeds();
  }

  title() {
    return `${this.shortName} – ubcache`;
  }

  update(status) {
    const home = status.sets.find((s) => s.id === this.id);
    this.home = home;
    this.set = home?.set ?? null;
    this.shortName = setNameOf(home ?? { id: this.id }, status.devices);
    say(this.heading, this.shortName);
    this.free = status.sets.filter((s) => !s.has_cache).flatMap((s) => s.volumes);
    this.attach.hidden = !this.free.length;
    this.buttons.hidden = !this.set || Boolean(this.set.failed);
    const why = home ? (this.set?.failed ?? home.why) : `There is no cache set ${this.id} now.`;
    this.problem.hidden = !why;
    say(this.problem, why ?? "");
    chip(this.state, home ? setStateOf(home) : ["bad", "gone"]);
    this.showGroup(home, status);
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
    this.damaged.set(s, typedOf(s.label, s.uuid));
    this.scrub.set(s.checksums, typedOf(s.label, s.uuid));
    this.table.set([home], status, this.speeds.of(home.volumes), this.latencies);
    this.tunables.set({ set: s }, s.tunables);
  }

  /** The other cache devices of the group of the set. */
  showGroup(home, status) {
    const others = membersOf(home?.group, status).filter((s) => s.id !== home.id);
    const now = JSON.stringify([home?.group, others.map((s) => [s.id, setNameOf(s, status.devices)])]);
    if (now === this.groupShown) return;
    this.groupShown = now;
    this.group.hidden = !home?.group;
    const links = others.flatMap((s, n) => [n ? ", " : "", el("a", { href: setHrefOf(s) }, setNameOf(s, status.devices))]);
    this.group.replaceChildren(...(others.length ? ["In one group with ", ...links, "."] : ["In a group; no other cache device of it is served."]));
  }

  async tick(n) {
    if (!this.set) return;
    await this.charted.tick();
    // Only the latencies of each volume are wanted.
    if (n % 2 === 0) this.latencies = (await get(`v1/history?since_ms=${Date.now()}`)).volumes;
    if (n % 3 === 0) this.buckets.draw(await get(`${pathOf({ set: this.set })}/buckets?cells=${this.buckets.wanted()}`));
  }

  redraw() {
    this.buckets.paint();
  }

  end() {
    this.charted.end();
  }
}
