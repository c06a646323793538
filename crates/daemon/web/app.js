// The page: which view is shown, when it asks for figures, jobs and events, theme and connection.

import { Refused, get, listen, setToken, takeToken } from "./api.js";
import { askForToken, cancelJob } from "./changes.js";
import { redrawAll } from "./charts.js";
import { bytes, clock, duration, el, say } from "./format.js";
import { Overview, SetView, VolumeView, hrefOf, nameOf, stateOf } from "./views.js";

const EVERY_MS = 1000;
/** Events that are shown. */
const EVENTS = 100;

const lamp = document.getElementById("lamp");
const nav = document.getElementById("nav");
const main = document.getElementById("main");
const theme = document.getElementById("theme");

let view;
let status;
let turn = 0;
let soon = null;

takeToken();

// ---- theme ----

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("ubcache-theme", name);
  theme.value = name;
  redrawAll();
  view?.redraw();
}
setTheme(["light", "dark"].includes(localStorage.getItem("ubcache-theme")) ? localStorage.getItem("ubcache-theme") : "auto");
theme.addEventListener("change", () => setTheme(theme.value));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(theme.value));

// ---- jobs and events, below every view ----

const jobs = el("section", { class: "card", "aria-label": "Jobs", hidden: true });
const events = el("ul", { class: "events" });
const eventsCard = el("section", { class: "card", "aria-label": "Events" }, el("header", {}, el("h2", {}, "Events")),
  el("div", { class: "events-scroll", tabIndex: 0, role: "region", "aria-label": "Events, the newest first" }, events), el("p", { class: "quiet small", id: "no-events" }, "Nothing has happened since the page was opened."));

function showJobs(list) {
  const latest = list.slice(-8).reverse();
  jobs.hidden = !latest.length;
  // What runs is above everything; what has ended is below, with the events.
  const running = list.some((job) => job.state === "running");
  if (view && jobs.parentElement && (jobs.parentElement.firstChild === jobs) !== running) {
    if (running) jobs.parentElement.prepend(jobs);
    else eventsCard.before(jobs);
  }
  const kind = { running: "info", done: "good", cancelled: "warn", failed: "bad" };
  jobs.replaceChildren(el("header", {}, el("h2", {}, "Jobs")), el("div", { class: "stack" }, latest.map((job) => {
    const done = el("i", { class: "done" });
    done.style.width = `${job.percent}%`;
    const words = [`${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}`];
    if (job.state === "running" && job.eta_seconds != null) words.push(`about ${duration(job.eta_seconds)} left`);
    if (job.error) words.push(job.error);
    return el("div", { "data-job": job.id },
      el("div", { class: "title" }, el("strong", {}, `${job.kind} ${job.target.length > 30 ? job.target.slice(0, 8) : job.target}`), el("span", { class: `chip ${kind[job.state]}` }, job.state),
        el("span", { class: "quiet small num grow" }, words.join(", ")),
        job.state === "running" && el("button", { type: "button", onclick: async () => (await cancelJob(job)) && refreshNow() }, "Cancel…")),
      job.state === "running" && el("div", { class: "meter", role: "progressbar", "aria-valuenow": job.percent, "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `${job.kind} ${job.target}` }, done));
  })));
}

const seen = new Set();
function showEvent(event) {
  if (seen.has(event.seq)) return;
  seen.add(event.seq);
  document.getElementById("no-events")?.remove();
  events.prepend(el("li", { class: event.level }, el("time", { class: "quiet num", dateTime: new Date(event.time_ms).toISOString() }, clock(event.time_ms)), event.text));
  while (events.children.length > EVENTS) events.lastChild.remove();
}

// ---- navigation ----

const routeNow = () => location.hash.replace(/^#/, "") || "/";

function showRoute() {
  const route = routeNow();
  // A place in the page, not a view.
  if (!route.startsWith("/") && view) return;
  const [, kind, name] = route.split("/");
  view?.end();
  const what = decodeURIComponent(name ?? "");
  view = kind === "volume" && what ? new VolumeView(what, refreshNow) : kind === "set" && what ? new SetView(what, refreshNow) : new Overview();
  main.replaceChildren(el("div", { class: "stack" }, view.element, jobs, eventsCard));
  turn = 0;
  if (status) show();
  refreshNow();
}

addEventListener("hashchange", () => {
  showRoute();
  scrollTo(0, 0);
});

function showNav() {
  const route = routeNow();
  const link = (href, text, state) => el("a", { href, "aria-current": `#${route}` === href ? "page" : null }, state && el("span", { class: `dot ${state}`, "aria-hidden": "true" }), text);
  const entries = status.sets.map((s) => {
    const volumes = s.volumes.map((v) => {
      const [kind] = stateOf(v);
      return el("li", {}, link(hrefOf(v), nameOf(v), kind === "bad" ? "bad" : v.attached ? "good" : "warn"));
    });
    if (!s.has_cache) return volumes;
    const bad = s.state !== "serving" || s.set?.failed;
    return el("li", {}, link(`#/set/${encodeURIComponent(s.id)}`, `Cache ${s.id.slice(0, 8)}`, bad ? "bad" : "good"), el("ul", {}, volumes));
  });
  const list = el("ul", {}, el("li", {}, link("#/", "Overview")), entries);
  // Whoever is there with the keyboard keeps the place.
  if (list.textContent + route !== nav.dataset.shown || [...list.querySelectorAll(".dot")].map((d) => d.className).join() !== nav.dataset.dots) {
    const focused = nav.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    nav.replaceChildren(list);
    nav.dataset.shown = list.textContent + route;
    nav.dataset.dots = [...list.querySelectorAll(".dot")].map((d) => d.className).join();
    if (focused) nav.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
    nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

// ---- figures ----

function show() {
  showNav();
  view.update(status);
  document.title = view.title();
  say(document.getElementById("about"), `version ${status.version}, up ${duration(status.uptime_seconds)}`);
}

function live(yes, text) {
  lamp.className = `lamp ${yes ? "live" : "lost"}`;
  say(lamp, text);
}

let asking = false;
let listening = false;
/** Nothing is asked any more: there is no token. */
let over = false;
async function step() {
  if (turn % 2 === 0 || !status) {
    status = await get("v1/status");
    status.last_errors.forEach(showEvent);
    showJobs((await get("v1/jobs")).jobs);
    show();
  }
  await view.tick(turn);
  turn += 1;
  live(true, "live");
  if (!listening) {
    listening = true;
    listen((event) => {
      showEvent(event);
      if (event.type !== "message") refreshNow();
    });
  }
}

/** What went wrong is said; where a token is wanted, it is asked for. */
async function failed(e) {
  live(false, e.status ? "refused" : "no answer, retrying");
  if (e.status === 401) {
    over = !(await askForToken(e.message, setToken));
    if (over) live(false, "no token: reload the page to enter one");
  } else if (e.status) {
    showEvent({ seq: `${e.status} ${e.message}`, level: "error", time_ms: Date.now(), text: e.message });
    // What is shown may be gone: the list says so.
    turn = 0;
  }
}

async function loop() {
  clearTimeout(soon);
  soon = null;
  if (over) return;
  if (!document.hidden && !asking) {
    asking = true;
    try {
      await step();
    } catch (e) {
      if (!(e instanceof Refused)) throw e;
      await failed(e);
    } finally {
      asking = false;
    }
  }
  soon ??= setTimeout(loop, EVERY_MS);
}

/** Something was changed: it is to be seen at once. */
function refreshNow() {
  turn = 0;
  clearTimeout(soon);
  soon = setTimeout(loop, 0);
}

document.addEventListener("visibilitychange", () => document.hidden || refreshNow());
showRoute();
