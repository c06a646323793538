// Two pictures on canvas: what the buckets hold, and what reaches a disk over time. Knows columns of values, and colours by name.

import { bytes, clock, count, el, percent, say } from "./format.js";

const colours = (names) => {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
};

/** A canvas as wide as its place, sharp on every screen. */
class Canvas {
  constructor(label, height, draw) {
    this.canvas = el("canvas", { class: "picture", role: "img", "aria-label": label, tabIndex: 0 });
    this.height = height;
    this.watch = new ResizeObserver(() => draw());
    this.watch.observe(this.canvas);
  }

  /** Ready to be drawn on, or nothing while it is not shown. */
  begin(height = this.height) {
    const width = Math.floor(this.canvas.parentElement?.clientWidth ?? 0);
    if (!width) return null;
    const scale = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    return { pen, width, height };
  }
}

/** The number and the bytes of the requests of each kind. */
function totals(requests) {
  const found = Object.fromEntries(KINDS.map(([k]) => [k, [0, 0]]));
  for (const r of requests) {
    found[r.kind][0] += 1;
    found[r.kind][1] += r.sectors * 512;
  }
  return found;
}

function key(entries) {
  return el("ul", { class: "key" }, entries.map(([name, text]) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = `var(--${name})`;
    const words = el("span", { class: "num" }, text);
    return el("li", { "data-kind": name }, swatch, words);
  }));
}

const HOLDS = [["dirty", "dirty"], ["clean", "clean"], ["metadata", "metadata"], ["unused", "unused"]];

/** What the buckets hold, in the order of the device: each cell is one bucket, or some, filled by share. */
export class Buckets {
  constructor() {
    this.canvas = new Canvas("What the buckets of the cache device hold", 200, () => this.paint());
    this.key = key(HOLDS);
    this.tip = el("p", { class: "tip", "aria-live": "off" }, " ");
    this.canvas.canvas.addEventListener("pointermove", (e) => this.point(e));
    this.canvas.canvas.addEventListener("pointerleave", () => say(this.tip, " "));
    this.element = el("section", { class: "card", "aria-label": "Buckets" },
      el("header", {}, el("h2", {}, "Buckets"), el("span", { class: "quiet small", id: "buckets-note" },
        "the cache device from start to end, row by row")),
      el("div", {}, this.canvas.canvas), this.key, this.tip);
    this.note = this.element.querySelector("#buckets-note");
  }

  /** How many cells there is room for. */
  wanted() {
    const width = this.canvas.canvas.parentElement?.clientWidth || 600;
    this.across = Math.max(24, Math.floor(width / (width < 500 ? 9 : 12)));
    return Math.min(4096, this.across * (width < 500 ? 30 : 18));
  }

  draw(map) {
    this.map = map;
    this.paint();
    const sum = (name) => map.columns[name].reduce((a, b) => a + b, 0);
    const words = [];
    for (const [name, text] of HOLDS) {
      const n = sum(name);
      words.push(`${text} ${percent((100 * n) / map.total)}`);
      say(this.key.querySelector(`[data-kind=${name}] .num`), `${text} ${count(n)} (${percent((100 * n) / map.total)})`);
    }
    const each = Math.round(map.total / map.columns.dirty.length);
    say(this.note, `${count(map.total)} buckets of ${bytes(map.bucket_bytes)} in the order of the device; a cell is ${each > 1 ? `${each} of them` : "one of them"}`);
    this.canvas.canvas.setAttribute("aria-label", `What the buckets of the cache device hold: ${words.join(", ")}`);
  }

  paint() {
    const cells = this.map?.columns.dirty.length;
    if (!cells) return;
    const width = this.canvas.canvas.parentElement?.clientWidth || 600;
    const most = Math.max(24, Math.floor(width / (width < 500 ? 9 : 12)));
    // Few cells are drawn larger, up to a limit.
    this.across = Math.min(most, Math.max(16, Math.ceil(Math.sqrt(cells * 5))));
    const size = width / this.across;
    const high = Math.min(size, 18);
    const rows = Math.ceil(cells / this.across);
    const c = this.canvas.begin(Math.ceil(rows * high));
    if (!c) return;
    const paint = colours(["dirty", "clean", "metadata", "unused"]);
    this.cell = { size, high };
    const columns = this.map.columns;
    for (let i = 0; i < cells; i++) {
      const x = (i % this.across) * size;
      const y = Math.floor(i / this.across) * high;
      const [w, h] = [Math.max(1, size - 1), Math.max(1, high - 1)];
      const all = columns.dirty[i] + columns.clean[i] + columns.metadata[i] + columns.unused[i] || 1;
      c.pen.fillStyle = paint.unused;
      c.pen.fillRect(x, y, w, h);
      let from = y + h;
      for (const name of ["metadata", "dirty", "clean"]) {
        const part = (h * columns[name][i]) / all;
        if (!part) continue;
        // Clean data that fills its buckets is shown stronger.
        c.pen.globalAlpha = name === "clean" ? 0.35 + 0.0065 * columns.live_percent[i] : 1;
        c.pen.fillStyle = paint[name];
        c.pen.fillRect(x, from - part, w, part);
        from -= part;
      }
      c.pen.globalAlpha = 1;
    }
  }

  point(event) {
    if (!this.cell || !this.map) return;
    const i = Math.floor(event.offsetY / this.cell.high) * this.across + Math.floor(event.offsetX / this.cell.size);
    const columns = this.map.columns;
    const cells = columns.dirty.length;
    if (!(i >= 0 && i < cells)) return say(this.tip, " ");
    const first = Math.floor((i * this.map.total) / cells);
    const last = Math.floor(((i + 1) * this.map.total) / cells) - 1;
    const parts = HOLDS.filter(([n]) => columns[n][i]).map(([n, text]) => (last > first ? `${columns[n][i]} ${text}` : text));
    say(this.tip, `bucket${last > first ? `s ${first}–${last}` : ` ${first}`} at ${bytes(first * this.map.bucket_bytes)}: ${parts.join(", ")}, ${columns.live_percent[i]} % live data`);
  }
}

const KINDS = [
  ["read", "reads"], ["write", "writes"], ["writeback", "writeback"], ["gap_read", "reads for writeback"],
  ["flush", "flushes"], ["discard", "discards"], ["metadata", "superblock"],
];
/** Seconds that the picture shows at most. */
const LONGEST = 600;
/** Steps of the axis of time in seconds. */
const STEPS = [5, 10, 15, 30, 60, 120, 300];
/** Requests that the picture holds at most. */
const MOST = 60000;

/** What reaches a disk: time from left to right, the place on the disk from below, a colour for each kind of request. */
export class DiskPicture {
  constructor() {
    this.requests = [];
    this.canvas = new Canvas("Requests to the backing device by time and place", 330, () => this.paint());
    this.key = key(KINDS);
    this.fit = el("input", { type: "checkbox", onchange: () => this.paint() });
    this.tip = el("p", { class: "tip" }, " ");
    this.element = el("section", { class: "card", "aria-label": "What reaches the backing device" },
      el("header", {}, el("h2", {}, "What reaches the backing device"),
        el("span", { class: "quiet small grow", id: "disk-note" }, "recorded while this page is open; time from left to right, place on the device from below"),
        el("label", { class: "choose" }, this.fit, "zoom to the requests")),
      el("div", {}, this.canvas.canvas), this.key, this.tip);
  }

  /** Takes an answer of the daemon. */
  add(trace) {
    this.size = trace.size_sectors;
    // Another daemon than before, with another clock.
    if (trace.now_us < (this.now_us ?? 0)) this.requests = [];
    this.now_us = trace.now_us;
    const { at_us, sector, sectors, kind } = trace.columns;
    // The daemon's clock counts from its own begin; the axis has the time of the host, as all charts.
    this.offset_us = (trace.now_ms ?? Date.now()) * 1000 - trace.now_us;
    this.missed = (this.missed ?? 0) + trace.missed;
    for (let i = 0; i < at_us.length; i++) {
      this.requests.push({ at: at_us[i], sector: sector[i], sectors: sectors[i], kind: kind[i] });
    }
    if (this.requests.length > MOST) this.requests.splice(0, this.requests.length - MOST);
    this.next = trace.next;
  }

  /** Draws the requests from `begin` to `end` in seconds since 1970, but no more than ten minutes: older ones are not kept. */
  draw(begin, end) {
    if (end) this.between = [Math.max(begin, end - LONGEST), end];
    this.paint();
  }

  paint() {
    const c = this.canvas.begin();
    if (!c || !this.size || !this.between) return;
    const { pen, width, height } = c;
    const [left, right, above, below] = [66, 16, 8, 24];
    const [w, h] = [width - left - right, height - above - below];
    const [begin, now] = this.between.map((t) => t * 1e6 - this.offset_us);
    const shown = this.requests.filter((r) => r.at >= begin);
    const places = shown.filter((r) => r.kind !== "flush");
    const [low, high] = this.range(places);
    const x = (at) => left + (w * (at - begin)) / (now - begin);
    const y = (sector) => above + h - (h * (sector - low)) / (high - low || 1);
    const paint = colours(["soft", "line", "line-soft", ...KINDS.map(([k]) => k)]);

    pen.font = "11px system-ui, sans-serif";
    pen.lineWidth = 1;
    this.sectors(pen, { left, right: width - right, low, high, y, paint });
    this.times(pen, { left, above, w, h, paint });
    pen.save();
    pen.beginPath();
    pen.rect(left, above, w, h);
    pen.clip();
    // Flushes are below the other requests, because they concern the whole device.
    for (const r of shown.filter((r) => r.kind === "flush")) {
      pen.fillStyle = paint.flush;
      pen.globalAlpha = 0.22;
      pen.fillRect(x(r.at), above, 1, h);
      pen.globalAlpha = 1;
      pen.fillRect(x(r.at) - 0.5, above + h - 6, 2, 6);
    }
    pen.globalAlpha = 0.9;
    for (const r of places) {
      const top = y(r.sector + r.sectors);
      const tall = Math.max(2.5, y(r.sector) - top);
      pen.fillStyle = paint[r.kind];
      pen.fillRect(x(r.at) - 1, top, 2.5, tall);
    }
    pen.restore();
    this.words(totals(shown), places);
  }

  /** The first and the last sector of the axis: those of the device, or a little more than those of the requests. */
  range(places) {
    if (!this.fit.checked || !places.length) return [0, this.size];
    const low = places.reduce((n, r) => Math.min(n, r.sector), Infinity);
    const high = places.reduce((n, r) => Math.max(n, r.sector + r.sectors), 0);
    const air = Math.max(64, (high - low) * 0.04);
    return [Math.max(0, low - air), Math.min(this.size, high + air)];
  }

  /** Marks of the axis of sectors. */
  sectors(pen, { left, right, low, high, y, paint }) {
    for (let i = 0; i <= 4; i++) {
      const sector = low + ((high - low) * i) / 4;
      const at = Math.round(y(sector)) + 0.5;
      pen.strokeStyle = i ? paint["line-soft"] : paint.line;
      pen.beginPath();
      pen.moveTo(left, at);
      pen.lineTo(right, at);
      pen.stroke();
      pen.fillStyle = paint.soft;
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      pen.fillText(bytes(sector * 512), left - 7, at);
    }
    pen.textBaseline = "alphabetic";
  }

  /** Marks of the axis of time, at whole times of day as in the charts. */
  times(pen, { left, above, w, h, paint }) {
    const [begin, end] = this.between;
    const step = STEPS.find((s) => (w * s) / (end - begin) > 70) ?? STEPS.at(-1);
    pen.textAlign = "center";
    for (let t = Math.ceil(begin / step) * step; t <= end; t += step) {
      const x = Math.round(left + (w * (t - begin)) / (end - begin)) + 0.5;
      pen.strokeStyle = paint["line-soft"];
      pen.beginPath();
      pen.moveTo(x, above);
      pen.lineTo(x, above + h);
      pen.stroke();
      const text = clock(t * 1000);
      if (x - left > 14) pen.fillText(step % 60 ? text : text.slice(0, 5), x, above + h + 16);
    }
  }

  words(totals, places) {
    const said = [];
    for (const [kind, text] of KINDS) {
      const [n, size] = totals[kind];
      const item = this.key.querySelector(`[data-kind=${kind}]`);
      // The main ones are always in the key, the others when there are any.
      item.hidden = !n && ["gap_read", "discard", "metadata"].includes(kind);
      const words = n ? `${text} ${count(n)}${kind === "flush" ? "" : `, ${bytes(size)}`}` : text;
      say(item.querySelector(".num"), words);
      if (n) said.push(words);
    }
    let behind = 0;
    for (let i = 1; i < places.length; i++) {
      if (places[i].sector === places[i - 1].sector + places[i - 1].sectors) behind += 1;
    }
    const parts = [];
    if (places.length > 1) {
      parts.push(`${percent((100 * behind) / (places.length - 1))} of the requests begin where the one before ended`);
    }
    if (this.missed) parts.push(`${count(this.missed)} requests were too many to be recorded`);
    say(this.tip, parts.join("; ") || (places.length ? " " : "no request has reached the device since the page was opened"));
    this.canvas.canvas.setAttribute("aria-label", `Requests to the backing device by time and place: ${said.join("; ") || "none"}`);
  }
}
