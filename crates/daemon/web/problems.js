// What needs an operator: the problems of the status answer, so that the page and `ubcache status` count the same. Must not find problems of its own.

import { el, prose, say } from "./format.js";
import { deviceNameOf, hrefOf, nameOf, named, setHrefOf, setNameOf } from "./names.js";

/** Kinds that stop no requests. */
const MILD = ["label_shared", "state_not_stored", "state_not_writable"];
/** Titles by kind; `name` is that of the volume, set or device, and the second value is what the title depends on. */
const TITLES = {
  stopping: () => "The daemon is stopping",
  set_failed: (name, disabled) => (disabled ? `${name} is disabled` : `${name} has failed`),
  io_disabled: (name) => `${name} fails every request`,
  device_failed: (name) => `${name} has failed`,
  device_waiting: (name, dirty) => (dirty ? `${name} waits, with dirty data` : `${name} waits`),
  set_silent: (name) => `${name} does not answer`,
  device_silent: (name) => `A device of ${name} does not answer`,
  stop_waits: (name) => `${name} is still stopping`,
  command_waits: () => "A command takes long",
  job_waits: () => "A job makes no progress",
  dead_export: (name) => `A device of ${name} is dead and in use`,
  damaged: (name) => `${name} has damaged dirty data`,
  one_copy: (name) => `${name} has one copy of its dirty data`,
  dirty_without_disk: (name) => `${name} has dirty data of a device that is not served`,
  stale: (name) => `${name} was used without its cache`,
  not_exported: (name) => `${name} is not exported`,
  io_errors: (name) => `${name} has errors`,
  label_shared: () => "Several volumes or sets have one label",
  state_not_stored: () => "The state cannot be stored",
  state_not_writable: () => "The state directory cannot be written",
};

/** The name and the page of what has a problem. */
function whose(problem, status) {
  const volume = status.sets.flatMap((s) => s.volumes).find((v) => v.name === problem.volume);
  if (volume) return { name: nameOf(volume), href: hrefOf(volume), volume };
  const device = status.devices.find((d) => d.path === problem.device);
  if (device) return { name: deviceNameOf(device), href: "#/", device };
  const set = status.sets.find((s) => s.id === problem.set);
  return set ? { name: setNameOf(set, status.devices), href: setHrefOf(set) } : { name: "a volume without a cache", href: "#/" };
}

/** The devices that the command of a problem registers, as the dialog takes them; none if it is another command. */
function registers(command) {
  const path = /^ubcache register (\/.*)$/.exec(command)?.[1];
  return path?.includes("&&") ? undefined : path;
}

function shown(problem, status) {
  const { name, href, device, volume } = whose(problem, status);
  const waits = problem.kind === "device_waiting";
  const dirty = waits && device?.dirty;
  const register = registers(problem.command);
  const disabled = status.sets.some((s) => s.id === problem.set && s.set?.failed);
  const title = TITLES[problem.kind]?.(name, waits ? dirty : disabled) ?? problem.kind;
  const action = register && register !== problem.device && waits ? "Register its cache…" : "Register…";
  // A copy that is being made needs nobody.
  const copying = problem.kind === "one_copy" && volume?.copy?.copied_percent != null;
  const kind = copying || MILD.includes(problem.kind) || (waits && !dirty) ? "warn" : "bad";
  return { kind, href, title, register, action, dirty, text: named(`${problem.text}.`, status).replace(/\.\.$/, "."), command: problem.command };
}

/** Every problem: `{kind, title, text, command}` with `href`, or with the path to `register` and its `action`. A disk that waits with dirty data comes first: who sees only the other volumes does not notice it. */
export function problemsOf(status) {
  const all = (status.problems ?? []).map((p) => shown(p, status));
  return [...all.filter((p) => p.dirty), ...all.filter((p) => !p.dirty)];
}

export const problemCount = (n) => (n === 0 ? "No problems" : n === 1 ? "1 problem" : `${n} problems`);

/** The list of problems. `register` asks whether a path is to be registered. */
export class Problems {
  constructor(register) {
    this.register = register;
    this.heading = el("h2", {});
    this.list = el("ul", { class: "problems" });
    this.element = el("section", { class: "card", "aria-label": "Problems", hidden: true }, el("header", {}, this.heading), this.list);
  }

  set(problems) {
    const now = JSON.stringify(problems);
    if (now === this.shown) return;
    this.shown = now;
    this.element.classList.toggle("alarm", problems.some((p) => p.kind === "bad"));
    this.element.hidden = !problems.length;
    say(this.heading, problemCount(problems.length));
    this.list.replaceChildren(...problems.map((p) => el("li", { class: p.kind },
      el("div", { class: "grow" }, el("h3", {}, p.href !== "#/" ? el("a", { href: p.href }, p.title) : p.title), el("p", { class: "small" }, prose(p.text)), el("p", { class: "small command" }, "Next: ", el("code", { class: "next" }, p.command))),
      p.register && el("button", { type: "button", "aria-label": `${p.action} (${p.title})`, onclick: () => this.register(p.register) }, p.action))));
  }
}
