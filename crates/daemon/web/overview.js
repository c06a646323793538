// The host: its problems, its figures, every set and volume, and stopped devices.

import { registerDevices } from "./actions.js";
import { Chart, hitRatio } from "./charts.js";
import { bytes, count, el, micros, percent, perSecond, say } from "./format.js";
import { GroupCard } from "./groups.js";
import { makeDevices } from "./make.js";
import { deviceNameOf, setNameOf, setStateOf } from "./names.js";
import { Charted, Facts, Speeds, line } from "./parts.js";
import { Problems, problemsOf } from "./problems.js";
import { SetCard } from "./sets.js";

export class Overview {
  constructor(changed) {
    this.changed = changed;
    this.heading = el("h1", { class: "grow" }, "This host");
    this.problems = new Problems((path) => this.register(path));
    this.facts = new Facts(["Requests", "Hit ratio, 5 min", "Reads, p99", "Writes, p99", "Dirty data", "Volumes"], true);
    this.charted = new Charted("v1", [
      new Chart("Requests", { note: "per second", show: count, top: 10, clip: true, series: [line("Reads", "reads", "read", { fill: true }), line("Writes", "writes", "write")] }),
      new Chart("Latency", { note: "p99 of the slowest volume, logarithmic", show: micros, log: true, series: [line("Reads", "read_p99_us", "read"), line("Writes", "write_p99_us", "write")] }),
      new Chart("Hit ratio", { note: "reads, over ten seconds", show: percent, max: 102, series: [{ label: "Hits", colour: "writeback", fill: true, value: hitRatio }] }),
    ]);
    this.sets = el("div", { class: "stack" });
    this.devices = el("section", { class: "card", "aria-label": "Stopped devices", hidden: true });
    // Jobs that run are shown here: below the problems.
    this.below = el("div", { hidden: true });
    this.element = el("div", { class: "stack" },
      el("div", { class: "title" }, this.heading, el("button", { type: "button", onclick: () => this.make() }, "Format devices…"),
        el("button", { type: "button", onclick: () => this.register() }, "Register devices…")),
      this.problems.element, this.below, el("section", { class: "card", "aria-label": "In short" }, this.facts.element), this.sets, this.devices,
      el("div", { class: "title" }, el("h2", {}, "All volumes over time"), this.charted.when, this.charted.range), this.charted.grid);
    this.cards = new Map();
    this.speeds = new Speeds();
    this.latencies = {};
  }

  async register(path = "") {
    if (await registerDevices(path)) this.changed();
  }

  /** Formats devices, and asks then whether to register them. */
  async make() {
    const made = await makeDevices();
    if (made) await this.register(made.join(" "));
  }

  title() {
    return this.hostname || "ubcache";
  }

  update(status, jobs) {
    this.status = status;
    this.hostname = status.hostname;
    say(this.heading, status.hostname || "This host");
    this.problems.set(problemsOf(status));
    this.figures(status);
    this.showSets(status);
    this.showDevices(status.devices.filter((d) => d.state === "stopped"));
  }

  figures(status) {
    const volumes = status.sets.flatMap((s) => s.volumes);
    this.now = this.speeds.of(volumes);
    const known = [...this.now.values()].filter((s) => s != null);
    if (known.length) this.facts.set("Requests", perSecond(known.reduce((a, b) => a + b, 0)));
    const sum = (of) => status.sets.filter((s) => s.set).reduce((n, s) => n + of(s.set.stats.five_minute), 0);
    const all = sum((v) => v.cache_hits + v.cache_misses);
    this.facts.set("Hit ratio, 5 min", all ? percent((100 * sum((v) => v.cache_hits)) / all) : "no reads");
    this.facts.set("Dirty data", bytes(volumes.reduce((n, v) => n + (v.flash_only ? 0 : v.dirty_bytes), 0)));
    this.facts.set("Volumes", volumes.length);
  }

  showSets(status) {
    const shown = this.cardsOf(status);
    const ids = new Set(shown.map(({ id }) => id));
    for (const [id, card] of this.cards) if (!ids.has(id)) (card.element.remove(), this.cards.delete(id));
    for (const [n, { id, group, sets }] of shown.entries()) {
      if (!this.cards.has(id)) this.cards.set(id, group ? new GroupCard(this.changed) : new SetCard(this.changed));
      const card = this.cards.get(id);
      card.update(sets, status, this.now, this.latencies);
      if (this.sets.children[n] !== card.element) this.sets.append(card.element);
    }
    this.empty ??= el("section", { class: "card" }, el("h2", {}, "Nothing is served yet"),
      el("p", {}, "Register devices with the button above, or by ", el("code", {}, "ubcache register /dev/fast /dev/slow"), "."));
    if (shown.length) this.empty.remove();
    else this.sets.append(this.empty);
  }

  /** What has a card: a set, a group of sets, and at the end what is served without a cache. Failed caches come first. */
  cardsOf(status) {
    const byName = (a, b) => setNameOf(a, status.devices).localeCompare(setNameOf(b, status.devices), undefined, { numeric: true });
    const caches = status.sets.filter((s) => s.has_cache).sort(byName);
    const cards = [];
    for (const set of caches) {
      const group = cards.find((card) => card.group && card.group === set.group);
      if (group) group.sets.push(set);
      else cards.push({ id: set.group ?? set.id, group: set.group, sets: [set] });
    }
    const failed = ({ sets }) => (sets.some((s) => setStateOf(s)[0] === "bad") ? 0 : 1);
    cards.sort((a, b) => failed(a) - failed(b));
    const alone = status.sets.filter((s) => !s.has_cache);
    const state = alone.find((s) => s.state !== "serving")?.state ?? "serving";
    if (alone.length) cards.push({ id: "alone", sets: [{ id: "alone", has_cache: false, state, volumes: alone.flatMap((s) => s.volumes) }] });
    return cards;
  }

  showDevices(idle) {
    this.devices.hidden = !idle.length;
    const shown = JSON.stringify(idle);
    if (shown === this.devicesShown) return;
    this.devicesShown = shown;
    this.devices.replaceChildren(el("h2", {}, "Stopped devices"), el("p", { class: "quiet small" }, "They are registered and are not served until they are registered again, or until the daemon starts again."),
      el("ul", { class: "plain-list" }, idle.map((d) => el("li", {}, el("strong", {}, deviceNameOf(d)), el("span", { class: "chip" }, d.dirty ? "stopped, dirty" : "stopped"), el("span", { class: "mono small quiet grow" }, d.path),
        el("button", { type: "button", "aria-label": `Register ${deviceNameOf(d)} again`, onclick: () => this.register(d.path) }, "Register…")))));
  }

  async tick() {
    const answer = await this.charted.tick();
    this.latencies = answer.volumes;
    const recent = (name) => this.charted.samples.recent(name, 60);
    if (this.facts.values.Requests.textContent === "") this.facts.set("Requests", perSecond(this.charted.samples.recent("reads") + this.charted.samples.recent("writes")));
    this.facts.set("Reads, p99", micros(recent("read_p99_us")));
    this.facts.set("Writes, p99", micros(recent("write_p99_us")));
    if (this.status) for (const card of this.cards.values()) card.latencies(answer.volumes);
  }

  redraw() {}

  end() {
    this.charted.end();
  }
}
