// Names and states of volumes, sets and devices for people: labels before numbers. Knows the shape of the status answer.

/** The last part of a path. */
export const baseName = (path) => String(path ?? "").replace(/\/+$/, "").split("/").at(-1);

/** The label of a volume, or its name if it has none. */
export const nameOf = (volume) => volume.label || volume.name;
export const hrefOf = (volume) => `#/volume/${encodeURIComponent(volume.name)}`;

/** A set by its label, or by its cache device; without one (it does not start), by the begin of its UUID. `devices` are those of the host. */
export function setNameOf(set, devices = []) {
  const cache = devices.find((d) => d.kind === "cache" && d.set === set.id);
  const label = set.set?.label || cache?.label;
  if (label) return `Cache ${label}`;
  const device = set.set?.device ?? cache?.path;
  return device ? `Cache ${baseName(device)}` : `Cache ${set.id.slice(0, 8)}`;
}
/** A set without the word that says what it is, for where that is clear. */
export const shortSetNameOf = (set, devices) => setNameOf(set, devices).replace(/^Cache /, "");
export const setHrefOf = (set) => `#/set/${encodeURIComponent(set.id)}`;

/** A device by its label, or by the last part of its path. */
export const deviceNameOf = (device) => device.label || baseName(device.path);

/** Names for UUIDs and volumes, for text of the daemon that has only these. */
export function titleOf(target, status) {
  const volume = status.sets.flatMap((s) => s.volumes).find((v) => v.name === target || v.backing_uuid === target);
  if (volume) return nameOf(volume);
  const set = status.sets.find((s) => s.id === target);
  return set?.has_cache ? setNameOf(set, status.devices) : target.length > 30 && !target.includes("/") ? target.slice(0, 8) : target;
}

const UUID = /(?<![\w/-])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![\w-])/g;

/** Text of the daemon with names in the place of UUIDs, except in paths; a UUID that has no name here is shortened. */
export function named(text, status) {
  return text.replace(UUID, (uuid) => (status ? titleOf(uuid, status) : uuid.slice(0, 8))).replace(/\bcache set Cache /g, "Cache ");
}

/** Kind and text of the state of a volume of a set. Amber is for what needs an operator; dirty is the normal state of writeback. */
export function stateOf(volume, set) {
  // Without the cache the newest data of a dirty volume cannot be reached.
  if (set?.set?.failed) return failsWithCache(volume) ? ["bad", "requests fail"] : ["warn", "cache disabled"];
  if (volume.problem) return ["bad", "not exported"];
  if (disabled(volume)) return ["bad", "io_disable is 1"];
  if (volume.flash_only) return ["", volume.stopped ? "stopped" : "flash-only"];
  if (!volume.attached) return ["", "no cache"];
  return volume.state === "dirty" ? ["info", "dirty"] : volume.state === "clean" ? ["good", "clean"] : ["bad", volume.state ?? "unknown"];
}

/** Whether the requests of a volume fail when its cache has failed. */
export const failsWithCache = (volume) => volume.attached && (volume.flash_only || volume.dirty_bytes > 0 || volume.state === "dirty");

/** Kind and text of the copies of the dirty data of a volume of a group. */
export function copyStateOf(copy) {
  if (copy.complete) return ["good", "in both sets"];
  return copy.copied_percent == null ? ["bad", "one copy"] : ["warn", `copying, ${Math.floor(copy.copied_percent)} %`];
}

/** Kind and text of a set's state. */
export function setStateOf(set) {
  if (set.set?.failed) return ["bad", "disabled"];
  if (set.state === "failed") return ["bad", "failed"];
  return [set.state === "serving" ? "good" : "", set.state];
}

/** A volume or set as a command names it: its label if a shell takes that as one word. */
export const typedOf = (label, name) => (/^[\p{L}\p{N}][\p{L}\p{N}._+:@-]*$/u.test(label ?? "") ? label : name);

export const tunableOf = (whose, key) => whose?.tunables?.find((t) => t.key === key)?.value;

/** Whether requests fail because of `io_disable`, which too many errors also set. */
export const disabled = (whose) => tunableOf(whose, "io_disable") === "1";
