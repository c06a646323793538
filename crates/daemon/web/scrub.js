// The scrub of a set: its progress, its last end, and what it has found.

import { bytes, count, el, moment, percent, say } from "./format.js";
import { Facts, Progress, chip } from "./parts.js";

const blocks = (n) => `${count(n)} block${n === 1 ? "" : "s"}`;

/** Damage that a scrub has found, in words; empty without any. */
function damageOf(report) {
  const parts = [[report.damaged_dirty_blocks, "of dirty data damaged"], [report.damaged_clean_blocks, "of clean data damaged and dropped"], [report.unreadable_blocks, "not readable"]];
  return parts.filter(([n]) => n).map(([n, what]) => `${blocks(n)} ${what}`).join(", ");
}

const share = (scrub) => (scrub.total_bytes ? Math.min(100, (100 * scrub.done_bytes) / scrub.total_bytes) : 0);
const progressOf = (scrub) => `${bytes(scrub.done_bytes)} of ${bytes(scrub.total_bytes)} (${percent(Math.floor(share(scrub)))})`;

/** Kind and text of the state of a scrub. */
function stateOf(scrub) {
  if (scrub.running) return ["info", "under way"];
  if (damageOf(scrub.report)) return ["bad", "found damage"];
  if (scrub.unfinished) return ["", "not finished"];
  return scrub.completed_unix_seconds == null ? ["", "never done"] : ["good", "done"];
}

/** The scrub of a set in one sentence; empty for a set without checksums. */
export function scrubWords(checksums) {
  if (!checksums) return "";
  const { scrub } = checksums;
  if (scrub.running) return `Scrub: ${progressOf(scrub)}.`;
  const last = scrub.completed_unix_seconds == null ? "Never scrubbed" : `Last scrub on ${moment(scrub.completed_unix_seconds)}`;
  const damage = damageOf(scrub.report);
  return `${last}${damage ? `; found: ${damage}` : ""}.`;
}

/** The scrub of a set; hidden for a set without checksums. */
export class ScrubCard {
  constructor() {
    this.state = el("span", { class: "chip" });
    this.progress = new Progress();
    this.facts = new Facts(["Progress", "Last complete scrub", "Verified", "Got a checksum", "Without a checksum", "Damaged"]);
    this.next = el("p", { class: "small" });
    this.element = el("section", { class: "card", "aria-label": "Scrub", hidden: true }, el("header", {}, el("h2", {}, "Scrub"), this.state), this.progress.element, this.facts.element, this.next);
  }

  /** `of` is what a command calls the set. */
  set(checksums, of) {
    this.element.hidden = !checksums;
    if (!checksums) return;
    const { scrub } = checksums;
    chip(this.state, stateOf(scrub));
    this.progress.element.hidden = !scrub.running;
    this.progress.set(share(scrub), "Scrub");
    this.facts.set("Progress", scrub.running ? progressOf(scrub) : scrub.unfinished ? "continues later" : "not under way");
    this.facts.set("Last complete scrub", scrub.completed_unix_seconds == null ? "never" : moment(scrub.completed_unix_seconds));
    const size = (n) => bytes(n * checksums.block_bytes);
    this.facts.set("Verified", size(scrub.report.verified_blocks));
    this.facts.set("Got a checksum", size(scrub.report.learnt_blocks));
    this.facts.set("Without a checksum", size(scrub.report.unverified_blocks));
    this.facts.set("Damaged", damageOf(scrub.report) || "none");
    if (this.of !== of) this.next.replaceChildren("The amounts are those of the scrub under way, or of the last one since the start. ", el("code", {}, `ubcache scrub ${of}`), " begins one.");
    this.of = of;
  }
}
