// Actions on devices, volumes and sets: register, attach, create, stop, detach, write back. Each says first what will happen.

import { post, remove } from "./api.js";
import { pathOf } from "./changes.js";
import { confirm, field } from "./dialog.js";
import { bytes, el } from "./format.js";
import { baseName, nameOf, setNameOf } from "./names.js";

const MIB = 1 << 20;

/** Registers devices; `path` is what is proposed. */
export function registerDevices(path = "") {
  const input = el("input", { type: "text", value: path, placeholder: "/dev/disk/by-id/…", autocomplete: "off", spellcheck: false });
  const paths = () => input.value.split(/\s+/).filter(Boolean);
  return confirm({
    title: path ? `Register ${path.split(" ").map(baseName).join(" and ")}` : "Register devices",
    action: "Register",
    body: (tell) => {
      const changed = () => tell(paths().length ? [
        `The superblock of ${paths().join(" and of ")} is read, and the device is claimed: no other program can open it for writing.`,
        "A cache device starts its set with all registered backing devices. A backing device is served with its set, or alone if it belongs to none.",
        "A backing device with dirty data waits for its cache device: it is not served without its newest data.",
        "No data is changed by the registration. The daemon serves the device again after a restart.",
      ] : [], "Register");
      input.addEventListener("input", changed);
      queueMicrotask(changed);
      return [
        field("paths", "Paths of the devices", input, "Separate several by spaces. A device must have a superblock of bcache."),
        el("p", { class: "quiet small" }, "A new device gets its superblock by “Format devices…” in the overview, or by ", el("code", {}, "ubcache make"), " on the host."),
      ];
    },
    act: () => post("v1/register", { devices: paths() }),
  });
}

/** Attaches a volume to a set: either is chosen. `sets` and `volumes` are those of the status answer that fit. */
export function attachVolume(sets, volumes) {
  const pick = (options) => el("select", {}, options.map(([value, text]) => el("option", { value }, text)));
  const set = pick(sets.map((s) => [s.id, setNameOf(s)]));
  const volume = pick(volumes.map((v) => [v.name, nameOf(v)]));
  return confirm({
    title: volumes.length === 1 ? `Attach ${nameOf(volumes[0])} to a cache` : `Attach a volume to ${setNameOf(sets[0])}`,
    action: "Attach",
    body: (tell) => {
      const changed = () => {
        const [into, what] = [sets.find((s) => s.id === set.value), volumes.find((v) => v.name === volume.value)];
        tell(into && what ? [
          `${nameOf(what)} becomes a volume of ${setNameOf(into)}. This is written to its superblock; its data stays where it is.`,
          "The volume is stopped and served again through the cache: its clients are disconnected and have to connect again. A volume that is mounted or otherwise in use is refused.",
          "The cache starts without data of this volume and is filled by reads and writes. The cache mode stays what the superblock says.",
        ] : [], "Attach");
      };
      set.addEventListener("change", changed);
      volume.addEventListener("change", changed);
      queueMicrotask(changed);
      return [field("attach-volume", "Volume", volume), field("attach-set", "Cache", set)];
    },
    act: () => post("v1/attach", { cache: set.value, backing: volume.value }),
  });
}

/** Makes a flash-only volume. */
export function createVolume(of) {
  const size = el("input", { type: "text", inputMode: "decimal", autocomplete: "off" });
  const unit = el("select", { "aria-label": "Unit" }, ["MiB", "GiB", "TiB"].map((u) => el("option", { value: u, selected: u === "GiB" }, u)));
  const label = el("input", { type: "text", autocomplete: "off", spellcheck: false, maxLength: 32 });
  const wanted = () => Math.floor(Number(size.value.replace(",", ".")) * MIB * { MiB: 1, GiB: 1024, TiB: 1 << 20 }[unit.value]);
  return confirm({
    title: `Create a flash-only volume in ${setNameOf(of)}`,
    action: "Create",
    body: (tell) => {
      const changed = () => {
        const n = wanted();
        const all = of.set.bucket_bytes * of.set.nbuckets;
        tell(n > 0 ? [
          `A volume of ${bytes(n)}${label.value.trim() ? ` with the label “${label.value.trim()}”` : ""} is made and served. Other volumes are served meanwhile.`,
          `Its data is on the cache device alone (${bytes(all)}): if the cache device is lost, the data is lost.`,
          "What is written to it takes room from the cache of the other volumes, and is never evicted.",
          "It cannot be made larger or smaller later.",
        ] : [], "Create");
      };
      for (const input of [size, unit, label]) input.addEventListener("input", changed);
      queueMicrotask(changed);
      return [
        el("div", { class: "field" }, el("label", { htmlFor: "size" }, "Size"), el("div", { class: "title" }, Object.assign(size, { id: "size" }), unit)),
        field("label", "Label", label, "Clients find the volume by it; may be empty."),
      ];
    },
    act: () => post(`${pathOf({ set: of.set })}/volumes`, { size_bytes: Math.floor(wanted() / 4096) * 4096, label: label.value.trim() }),
  });
}

export function stopVolume(volume) {
  const dirty = volume.dirty_bytes && !volume.flash_only;
  return confirm({
    title: `Stop ${nameOf(volume)}`,
    action: "Stop the volume",
    danger: true,
    sentences: [
      "Clients are disconnected, and the volume is not served any more. A volume that is mounted or otherwise in use is refused and stays served.",
      dirty ? `${bytes(volume.dirty_bytes)} stay dirty on the cache device: the backing device alone has not the newest data. “Drain…” before the stop writes them back.`
        : "No data is lost: all data stays on its devices.",
      volume.backing_device ? `It is served again when ${volume.backing_device} is registered again (“Register…” in the overview), or when the daemon starts again.`
        : "It stays in the list, keeps its room in the cache, and is served again by “Serve again…”, or when the daemon starts again.",
    ],
    act: () => post(`${pathOf({ volume })}/stop`),
  });
}

/** Serves a stopped flash-only volume again. */
export function serveAgain(volume) {
  return confirm({
    title: `Serve ${nameOf(volume)} again`,
    action: "Serve again",
    sentences: ["The volume is served as the configuration says, and clients can connect again. Its data is as it was at the stop."],
    act: () => post("v1/register", { devices: [], volumes: [volume.name] }),
  });
}

export function drain(of, name) {
  const dirty = (of.volume ?? of.set).dirty_bytes;
  return confirm({
    title: `Drain ${name}`,
    action: "Drain",
    sentences: [
      `${bytes(dirty)} of dirty data are written to the backing device${of.volume ? "" : "s"} as fast as the devices allow, and stay in the cache as clean data.`,
      "Clients are served meanwhile; their reads from the backing device take longer. Data that they write meanwhile is written back, too.",
      "This is a job with progress, which can be cancelled: data that is written back until then stays clean.",
    ],
    act: () => post(`${pathOf(of)}/drain`),
  });
}

export function detach(volume) {
  return confirm({
    title: `Detach ${nameOf(volume)}`,
    action: "Detach",
    danger: true,
    sentences: [
      volume.dirty_bytes
        ? `First the ${bytes(volume.dirty_bytes)} that are dirty are written back, as fast as the devices allow. Until this is done the job can be cancelled.`
        : "Nothing is dirty, so nothing is written back first.",
      `Then ${volume.backing_device ?? "the backing device"} is detached: its cached data is invalid from then on, and every request goes to the backing device.`,
      "No client is disconnected, but requests are slower. “Attach…” attaches the volume to a cache again, without cached data.",
    ],
    act: () => post(`${pathOf({ volume })}/detach`),
  });
}

export function collectGarbage(set) {
  return confirm({
    title: "Collect garbage",
    action: "Collect now",
    sentences: [
      "Garbage collection walks the index once and frees buckets without live data. It also runs by itself; this runs it now.",
      "No data is lost and no client is disconnected. Requests may take longer for some seconds.",
    ],
    act: () => post(`${pathOf({ set })}/gc`),
  });
}

export function cancelJob(job, name) {
  return confirm({
    title: `Cancel ${job.kind} of ${name}`,
    action: "Cancel the job",
    danger: true,
    sentences: [`${job.percent} % are done and stay done. The rest is not changed${job.kind === "detach" ? ", and the volume stays attached" : ""}.`],
    act: () => remove(`v1/jobs/${job.id}`),
  });
}

/** Asks for the token, where the daemon wants one. */
export function askForToken(why, take) {
  const input = el("input", { type: "password", autocomplete: "off" });
  return confirm({
    title: "Token",
    action: "Continue",
    body: () => [el("p", {}, why), field("token", "Token of this daemon", input)],
    sentences: ["The token is kept in this tab until it is closed, and sent with each request."],
    focus: input,
    act: async () => take(input.value.trim()),
  });
}
