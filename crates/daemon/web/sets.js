// A cache set in the overview: its name, its state, how full it is, and its volumes.

import { attachVolume, createVolume } from "./actions.js";
import { el, say } from "./format.js";
import { setHrefOf, setNameOf, setStateOf } from "./names.js";
import { Space, VolumeTable, chip } from "./parts.js";

/** The name, state, space and actions of a set; `level` is that of its heading. */
export class SetHead {
  constructor(changed, level) {
    this.name = el("a", {});
    this.state = el("span", { class: "chip" });
    this.where = el("span", { class: "quiet small grow" });
    this.space = new Space();
    const act = (text, what) => el("button", { type: "button", class: "link", onclick: async () => (await what()) && changed() }, text);
    this.attach = act("Attach a volume…", () => attachVolume([this.set], this.free));
    this.create = act("Create a volume…", () => createVolume(this.set));
    this.header = el("header", {}, el(level, {}, this.name), this.state, this.where, this.attach, this.create);
  }

  /** Returns the name. */
  update(set, status) {
    this.set = set;
    this.free = status.sets.filter((s) => !s.has_cache).flatMap((s) => s.volumes);
    const name = set.has_cache ? setNameOf(set, status.devices) : "Served without a cache";
    say(this.name, name);
    if (set.has_cache) this.name.href = setHrefOf(set);
    chip(this.state, setStateOf(set));
    say(this.where, set.set?.device ?? "");
    const serves = Boolean(set.set) && !set.set.failed;
    this.attach.hidden = !serves || !this.free.length;
    this.create.hidden = !serves;
    this.space.element.hidden = !set.set;
    if (set.set) this.space.set(set.set);
    return name;
  }
}

/** A set that is in no group. */
export class SetCard {
  constructor(changed) {
    this.head = new SetHead(changed, "h2");
    this.table = new VolumeTable();
    this.element = el("section", { class: "card" }, this.head.header, this.head.space.element, this.table.element);
  }

  update([set], status, speeds, latencies) {
    this.set = set;
    this.status = status;
    this.speeds = speeds;
    this.element.setAttribute("aria-label", this.head.update(set, status));
    this.latencies(latencies);
  }

  latencies(of) {
    this.table.set([this.set], this.status, this.speeds, of);
  }
}
