// The page: which view is shown, when it asks for figures, jobs and events, theme and connection.

import { askForToken, cancelJob } from "./actions.js";
import { Refused, get, listen, setToken, takeToken } from "./api.js";
import { redrawAll } from "./charts.js";
import { bytes, clock, duration, el, prose, say } from "./format.js";
import { hrefOf, nameOf, named, setHrefOf, setNameOf, setStateOf, stateOf, titleOf } from "./names.js";
import { Overview } from "./overview.js";
import { problemCount, problemsOf } from "./problems.js";
import { SetView, VolumeView } from "./views.js";

const EVERY_MS = 1000;
/** Events that are shown. */
const EVENTS = 100;

const lamp = document.getElementById("lamp");
const nav = document.getElementById("nav");
const main = document.getElementById("main");
const theme = document.getElementById("theme");
const host = document.getElementById("host");
const trouble = document.getElementById("trouble");

let view;
let status;
let jobList = [];
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

/** What runs is at the top, in the overview below the problems; what has ended is below, with the events. */
function placeJobs(running) {
  if (!view || !eventsCard.parentElement) return;
  const top = view.below ?? main.firstElementChild;
  if (running === (jobs.parentElement === view.below || main.firstElementChild.firstChild === jobs)) return;
  if (view.below) view.below.hidden = !running;
  if (running) top.prepend(jobs);
  else eventsCard.before(jobs);
}

function showJobs(list) {
  const latest = list.slice(-8).reverse();
  jobs.hidden = !latest.length;
  placeJobs(list.some((job) => job.state === "running"));
  const kind = { running: "info", done: "good", cancelled: "", failed: "bad" };
  jobs.replaceChildren(el("header", {}, el("h2", {}, "Jobs")), el("div", { class: "stack" }, latest.map((job) => {
    const done = el("i", { class: "done" });
    done.style.width = `${job.percent}%`;
    const words = [`${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}`];
    if (job.state === "running" && job.eta_seconds != null) words.push(`about ${duration(job.eta_seconds)} left`);
    if (job.error) words.push(job.error);
    const target = titleOf(job.target, status);
    return el("div", { "data-job": job.id },
      el("div", { class: "title" }, el("strong", {}, `${job.kind} ${target}`), el("span", { class: `chip ${kind[job.state]}` }, job.state),
        el("span", { class: "quiet small num grow" }, words.join(", ")),
        job.state === "running" && el("button", { type: "button", onclick: async () => (await cancelJob(job, target)) && refreshNow() }, "Cancel…")),
      job.state === "running" && el("div", { class: "meter", role: "progressbar", "aria-valuenow": job.percent, "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": `${job.kind} ${target}` }, done));
  })));
}

const seen = new Set();
function showEvent(event) {
  if (seen.has(event.seq)) return;
  seen.add(event.seq);
  document.getElementById("no-events")?.remove();
  // The same text again is one line with the number of times.
  const same = events.firstChild?.dataset.text === event.text ? events.firstChild : null;
  const times = same ? Number(same.dataset.times) + 1 : 1;
  same?.remove();
  events.prepend(el("li", { class: event.level, "data-text": event.text, "data-times": times },
    el("time", { class: "quiet num", dateTime: new Date(event.time_ms).toISOString() }, clock(event.time_ms)),
    el("span", {}, prose(named(event.text, status)), times > 1 && el("span", { class: "quiet" }, ` (${times} times)`))));
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
  view = kind === "volume" && what ? new VolumeView(what, refreshNow) : kind === "set" && what ? new SetView(what, refreshNow) : new Overview(refreshNow);
  main.replaceChildren(el("div", { class: "stack" }, view.element, jobs, eventsCard));
  turn = 0;
  if (status) show();
  refreshNow();
}

addEventListener("hashchange", () => {
  showRoute();
  scrollTo(0, 0);
});

/** Where one can go: `{href, text, state, volumes}`; those without a cache at the end. */
function places() {
  const calm = { "": "good", info: "good" };
  const ofVolume = (set) => (v) => {
    const [kind] = stateOf(v, set);
    return { href: hrefOf(v), text: nameOf(v), state: calm[kind] ?? kind, volumes: [] };
  };
  const byName = (a, b) => a.text.localeCompare(b.text, undefined, { numeric: true });
  const caches = status.sets.filter((s) => s.has_cache).map((s) => ({
    href: setHrefOf(s), text: setNameOf(s, status.devices), state: setStateOf(s)[0] || "good", volumes: s.volumes.map(ofVolume(s)).sort(byName),
  }));
  const alone = status.sets.filter((s) => !s.has_cache).flatMap((s) => s.volumes.map(ofVolume(s))).sort(byName);
  return [{ href: "#/", text: "Overview", volumes: [] }, ...caches.sort(byName), ...(alone.length ? [{ text: "Without a cache", volumes: alone }] : [])];
}

function showNav() {
  const route = `#${routeNow()}`;
  const all = places();
  const shown = JSON.stringify([route, all]);
  if (shown === nav.dataset.shown) return;
  nav.dataset.shown = shown;
  const link = ({ href, text, state }) => (href ? el("a", { href, "aria-current": route === href ? "page" : null }, state && el("span", { class: `dot ${state}`, "aria-hidden": "true" }), text, state === "bad" && el("span", { class: "unseen" }, ", with a problem"))
    : el("span", { class: "nav-title" }, text));
  const list = el("ul", {}, all.map((p) => el("li", {}, link(p), p.volumes.length > 0 && el("ul", {}, p.volumes.map((v) => el("li", {}, link(v)))))));
  // On a small screen a choice takes the place of the list.
  const option = ({ href, text, state }, indent) => href && el("option", { value: href, selected: href === route }, `${indent}${text}${state === "bad" ? " – problem" : ""}`);
  const choice = el("select", { "aria-label": "Go to", onchange: (e) => (location.hash = e.target.value) },
    all.flatMap((p) => [option(p, ""), ...p.volumes.map((v) => option(v, "\u00a0\u00a0"))]));
  // Whoever is there with the keyboard keeps the place.
  const focused = nav.contains(document.activeElement) ? document.activeElement : null;
  nav.replaceChildren(choice, list);
  if (focused?.matches("select")) choice.focus();
  else if (focused) nav.querySelector(`a[href="${CSS.escape(focused.getAttribute("href"))}"]`)?.focus();
}

// ---- figures ----

function show() {
  showNav();
  view.update(status, jobList);
  const problems = problemsOf(status);
  say(host, status.hostname ?? "");
  say(trouble, problemCount(problems.length));
  trouble.className = `trouble ${problems.some((p) => p.kind === "bad") ? "bad" : problems.length ? "warn" : "good"}`;
  trouble.hidden = false;
  document.title = `${problems.length ? `(${problems.length}) ` : ""}${view.title()}`;
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
    jobList = (await get("v1/jobs")).jobs;
    showJobs(jobList);
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
