// The tunables of a volume or set: folded in groups, the dangerous ones apart, with what they mean and the means to change them.

import { changeTunable, resetTunable } from "./changes.js";
import { el, say, setting } from "./format.js";

const GROUPS = [
  ["What enters the cache", ["cache_mode", "admission", "sequential_cutoff", "readahead_cache_policy", "congested_read_threshold_us", "congested_write_threshold_us", "cache_replacement_policy", "replacement", "discard"]],
  ["Dirty data and writeback", ["writeback_percent", "writeback_delay", "writeback_controller", "writeback_latency_ms", "writeback_bridge", "writeback_bridge_limit", "writeback_batch_sectors", "writeback_metadata", "cutoff_writeback", "cutoff_writeback_sync", "idle_max_writeback_rate"]],
  ["The rate of writeback", ["writeback_rate", "writeback_rate_update_seconds", "writeback_rate_minimum", "writeback_rate_p_term_inverse", "writeback_rate_i_term_inverse", "writeback_consider_fragment", "writeback_rate_fp_term_low", "writeback_rate_fp_term_mid", "writeback_rate_fp_term_high"]],
  ["Name and housekeeping", ["label", "journal_delay_ms", "gc_after_writeback", "gc_always_rewrite", "copy_gc_enabled", "overwrite_in_place", "btree_cache_limit", "btree_shrinker_disabled"]],
];
/** What can stop the service of clients, or let dirty data collect without a limit. */
const DANGEROUS = ["io_disable", "writeback_running", "io_error_limit", "io_error_halflife", "errors", "stop_when_cache_set_failed", "synchronous"];
const OTHERS = "Others";
const DANGER = "Dangerous";
const DANGER_NOTE = "can stop clients or writeback";

function groupOf(key) {
  if (DANGEROUS.includes(key)) return DANGER;
  return GROUPS.find(([, keys]) => keys.includes(key))?.[0] ?? OTHERS;
}

/** A group, closed until it is opened or something in it is searched for. */
class Group {
  constructor(title) {
    this.rows = el("tbody");
    this.note = title === DANGER ? `, ${DANGER_NOTE}` : "";
    this.about = el("span", { class: "quiet small" });
    this.element = el("details", { class: title === DANGER ? "group danger" : "group" },
      el("summary", {}, el("h3", {}, title), this.about),
      el("table", { class: "tunables cards" }, el("thead", {}, el("tr", {}, ["Name", "Value", "What it does", "Change"].map((t) => el("th", { class: t === "Change" ? "right" : "", scope: "col" }, t)))), this.rows));
  }

  set(rows) {
    this.rows.replaceChildren(...rows);
    const changed = rows.filter((r) => r.classList.contains("changed")).length;
    say(this.about, `${rows.length}${changed ? `, ${changed} not the default` : ""}${this.note}`);
    this.element.classList.toggle("has-changed", changed > 0);
  }

  /** Shows the rows that fit; `filtered` is whether anything is searched for. */
  filter(fits, filtered) {
    for (const row of this.rows.children) row.hidden = !fits(row);
    const some = [...this.rows.children].some((row) => !row.hidden);
    this.element.hidden = !some;
    if (filtered && !this.filtered) this.before = this.element.open;
    if (filtered) this.element.open = some;
    else if (this.filtered) this.element.open = this.before;
    this.filtered = filtered;
  }
}

export class Tunables {
  constructor(change) {
    this.find = el("input", { type: "search", placeholder: "find", "aria-label": "Find a tunable", oninput: () => this.filter() });
    this.only = el("input", { type: "checkbox", onchange: () => this.filter() });
    this.change = change;
    this.groups = new Map([...GROUPS.map(([title]) => title), OTHERS, DANGER].map((title) => [title, new Group(title)]));
    this.element = el("section", { class: "card", "aria-label": "Tunables" },
      el("header", {}, el("h2", { class: "grow" }, "Tunables"), el("label", { class: "choose" }, this.only, "not the default"), this.find),
      [...this.groups.values()].map((g) => g.element));
  }

  set(of, tunables) {
    const same = JSON.stringify(tunables);
    this.of = of;
    if (same === this.shown) return;
    this.shown = same;
    const focused = this.element.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const rows = new Map([...this.groups.keys()].map((title) => [title, []]));
    for (const t of tunables) rows.get(groupOf(t.key)).push([t.key, this.row(t)]);
    for (const [title, group] of this.groups) {
      const order = GROUPS.find(([name]) => name === title)?.[1] ?? DANGEROUS;
      group.set(rows.get(title).sort(([a], [b]) => order.indexOf(a) - order.indexOf(b)).map(([, row]) => row));
    }
    this.filter();
    if (focused) this.element.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }

  row(t) {
    const other = t.value !== t.default && t.default !== "" && t.key !== "writeback_rate";
    const flag = t.range === "0 or 1" ? { 0: "off", 1: "on" } : {};
    const shown = (value) => flag[value] ?? setting(value, t.unit);
    const change = (label, what, aria) => el("button", { type: "button", class: "link", "aria-label": aria, onclick: () => this.change(what) }, label);
    return el("tr", { class: other ? "changed" : "", "data-key": t.key },
      el("td", { class: "mono" }, t.key),
      el("td", { class: "value num" }, shown(t.value)),
      el("td", { class: "quiet small whole" }, t.doc, t.default === "" ? "" : ` (default ${shown(t.default)})`),
      el("td", { class: "right" },
        change("Change", () => changeTunable(this.of, t), `Change ${t.key}`),
        other && !t.in_superblock && change("Reset", () => resetTunable(this.of, t), `Reset ${t.key}`)));
  }

  filter() {
    const wanted = this.find.value.trim().toLowerCase();
    const filtered = Boolean(wanted) || this.only.checked;
    const fits = (row) => !(wanted && !row.textContent.toLowerCase().includes(wanted)) && !(this.only.checked && !row.classList.contains("changed"));
    for (const group of this.groups.values()) group.filter(fits, filtered);
  }
}
