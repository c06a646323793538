// Groups of cache devices: the members side by side, the roles of their sets, and whether dirty data is in two sets.

import { bytes, duration, el, moment, percent, say } from "./format.js";
import { copyStateOf, setHrefOf, setNameOf, shortSetNameOf } from "./names.js";
import { Facts, Progress, VolumeTable, chip } from "./parts.js";
import { scrubWords } from "./scrub.js";
import { SetHead } from "./sets.js";

/** The sets of a group that are served or should be. */
export const membersOf = (group, status) => (group ? status.sets.filter((s) => s.group === group) : []);

/** Since when, and for how long. */
const since = (seconds) => `${moment(seconds)} (${duration(Math.max(0, Date.now() / 1000 - seconds))})`;

/** Copies of dirty data together: the number of volumes with one copy, their bytes, the earliest time, and what is copied. */
function summed(copies) {
  const alone = copies.filter((c) => !c.complete);
  const making = alone.filter((c) => c.copied_percent != null);
  const sum = (of, key) => of.reduce((n, c) => n + (c[key] ?? 0), 0);
  const times = alone.map((c) => c.one_copy_since_unix_seconds).filter((t) => t != null);
  const [done, all] = [sum(making, "copied_bytes"), sum(making, "one_copy_bytes")];
  const share = making.length === 1 ? making[0].copied_percent : all ? (100 * done) / all : 0;
  return { alone: alone.length, bytes: sum(alone, "one_copy_bytes"), since: times.length ? Math.min(...times) : null, making: making.length, done, all, share };
}

const copied = (s) => `${bytes(s.done)} of ${bytes(s.all)} copied (${percent(Math.floor(s.share))})`;

/** The next command for volumes with one copy; none if the daemon makes the copy. */
function commandFor(volumes, status) {
  const names = volumes.map((v) => v.name);
  const problem = (status.problems ?? []).find((p) => p.kind === "one_copy" && names.includes(p.volume) && p.command !== "ubcache status");
  return problem?.command;
}

/** The progress of a resync, and the next command. */
class Resync {
  constructor() {
    this.progress = new Progress();
    this.words = el("p", { class: "small num" });
    this.code = el("code", { class: "next" });
    this.next = el("p", { class: "small command" }, "Next: ", this.code);
    this.element = el("div", { class: "resync" }, this.progress.element, this.words, this.next);
  }

  set(sum, command) {
    this.element.hidden = !sum.making && !command;
    this.progress.element.hidden = this.words.hidden = !sum.making;
    this.progress.set(sum.share, "Copy of the dirty data");
    say(this.words, `${copied(sum)}; the data is safe when the copy is complete.`);
    this.next.hidden = !command;
    say(this.code, command ?? "");
  }
}

/** One cache device of a group. */
class Member {
  constructor(changed) {
    this.head = new SetHead(changed, "h3");
    this.scrub = el("p", { class: "small quiet num" });
    this.element = el("div", { class: "member" }, this.head.header, this.head.space.element, this.scrub);
  }

  update(set, status) {
    this.head.update(set, status);
    const words = scrubWords(set.set?.checksums);
    this.scrub.hidden = !words;
    say(this.scrub, words);
  }
}

/** A group in the overview. */
export class GroupCard {
  constructor(changed) {
    this.changed = changed;
    this.name = el("h2", {});
    this.state = el("span", { class: "chip" });
    this.words = el("span", { class: "small grow num" });
    this.resync = new Resync();
    this.members = new Map();
    this.missing = el("div", { class: "member missing" }, el("header", {}, el("h3", {}, "Second cache device"), el("span", { class: "chip bad" }, "not served")),
      el("p", { class: "small" }, "No other cache device of this group is served. Register it, or make a new one with ", el("code", {}, "ubcache group add"), " and register that."));
    this.row = el("div", { class: "members" });
    this.table = new VolumeTable(true);
    this.element = el("section", { class: "card" }, el("header", {}, this.name, this.state, this.words), this.resync.element, this.row, this.table.element);
  }

  update(sets, status, speeds, latencies) {
    this.sets = sets;
    this.status = status;
    this.speeds = speeds;
    const name = `Group of ${sets.map((s) => shortSetNameOf(s, status.devices)).join(" and ")}`;
    say(this.name, name);
    this.element.setAttribute("aria-label", name);
    const volumes = sets.flatMap((s) => s.volumes);
    const sum = summed(volumes.map((v) => v.copy).filter(Boolean));
    const [kind, state] = sum.alone === 0 ? (sets.length > 1 ? ["good", "protected"] : ["warn", "one cache device"]) : sum.making === sum.alone ? ["warn", "degraded, copying"] : ["bad", "degraded"];
    chip(this.state, [kind, state]);
    const from = sum.since == null ? "" : `, since ${since(sum.since)}`;
    const amount = sum.bytes ? `${bytes(sum.bytes)} of dirty data on one cache device only` : "New dirty data would be on one cache device only";
    say(this.words, sum.alone ? `${amount}${from}` : sets.length > 1 ? "All dirty data is in two sets" : "");
    this.words.classList.toggle("quiet", !sum.alone);
    this.resync.set(sum, commandFor(volumes, status));
    this.showMembers(sets, status);
    this.latencies(latencies);
  }

  showMembers(sets, status) {
    for (const [id, member] of this.members) if (!sets.some((s) => s.id === id)) (member.element.remove(), this.members.delete(id));
    for (const [n, set] of sets.entries()) {
      if (!this.members.has(set.id)) this.members.set(set.id, new Member(this.changed));
      const member = this.members.get(set.id);
      member.update(set, status);
      if (this.row.children[n] !== member.element) this.row.insertBefore(member.element, this.row.children[n] ?? null);
    }
    if (sets.length > 1) this.missing.remove();
    else if (!this.missing.isConnected) this.row.append(this.missing);
  }

  latencies(of) {
    this.table.set(this.sets, this.status, this.speeds, of);
  }
}

/** The copies of the dirty data of a volume; hidden for a volume whose set is in no group. */
export class CopyCard {
  constructor() {
    this.state = el("span", { class: "chip" });
    this.facts = new Facts(["Primary set", "Secondary set", "With one copy", "Since"]);
    this.resync = new Resync();
    this.element = el("section", { class: "card", "aria-label": "Copies of the dirty data", hidden: true },
      el("header", {}, el("h2", {}, "Copies of the dirty data"), this.state), this.facts.element, this.resync.element);
  }

  set(volume, home, status) {
    const { copy } = volume;
    this.element.hidden = !copy;
    if (!copy) return;
    chip(this.state, copyStateOf(copy));
    const second = status.sets.find((s) => s.id === copy.second_set);
    const link = (set) => el("a", { href: setHrefOf(set) }, setNameOf(set, status.devices));
    this.facts.set("Primary set", link(home));
    this.facts.set("Secondary set", second ? link(second) : "none");
    this.facts.set("With one copy", copy.complete ? "none" : bytes(copy.one_copy_bytes));
    this.facts.set("Since", copy.one_copy_since_unix_seconds == null ? "–" : since(copy.one_copy_since_unix_seconds));
    this.resync.set(summed([copy]), commandFor([volume], status));
  }
}
