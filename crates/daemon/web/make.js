// The dialog that formats devices. What will happen is the daemon's own dry run, with the refusals of `ubcache make`.

import { Refused, post } from "./api.js";
import { confirm, field } from "./dialog.js";
import { el } from "./format.js";
import { baseName } from "./names.js";

const paths = (input) => input.value.split(/\s+/).filter(Boolean);

const text = (placeholder) => el("input", { type: "text", placeholder, autocomplete: "off", spellcheck: false });

/** A box to tick, with its explanation. */
function tick(label, note) {
  const input = el("input", { type: "checkbox" });
  return [input, el("label", { class: "tick" }, input, el("span", {}, label, el("span", { class: "quiet small" }, note)))];
}

/** The lines of the dry run, one for each device: details are indented there. */
function sentences(lines) {
  const all = [];
  for (const line of lines) {
    if (line.startsWith(" ")) all.push(`${all.pop() ?? ""}; ${line.trim()}`);
    else if (line !== "nothing was written") all.push(line);
  }
  return all.map((line) => `${line}.`);
}

/** The fields of the dialog; `order` reads them. */
function fields() {
  const cache = text("/dev/disk/by-id/… (fast)");
  const backing = text("/dev/disk/by-id/… (slow)");
  const label = text("films");
  label.maxLength = 32;
  const [writeback, writebackBox] = tick("Cache writes, too", "Mode writeback; else writes go to the disk at once.");
  const [wipe, wipeBox] = tick("Overwrite devices of bcache", "As --wipe; dirty data is refused nevertheless.");
  const [force, forceBox] = tick("Overwrite anything else", "As --force: file systems, partition tables, …");
  const lost = text("nvme0n1p4");
  const order = (dryRun) => ({
    ...(cache.value.trim() && { cache: cache.value.trim() }), backing: paths(backing), label: label.value.trim(), writeback: writeback.checked,
    wipe: wipe.checked, force: force.checked, lose_dirty_data_of: paths(lost), dry_run: dryRun,
  });
  const lostField = field("make-lost", "Lose the dirty data of", lost, "It exists nowhere else. To lose it, type the name of the device: the last part of its path.");
  lostField.hidden = true;
  const dangerous = () => wipe.checked || force.checked || paths(lost).length > 0;
  return {
    inputs: [cache, backing, label, writeback, wipe, force, lost], order, dangerous, lostField,
    devices: () => [...paths(cache), ...paths(backing)],
    shown: [
      field("make-cache", "Cache device (or none)", cache),
      field("make-backing", "Backing devices (or none)", backing, "Several are separated by spaces, and get their labels later."),
      field("make-label", "Label of the backing device (or none)", label),
      writebackBox, wipeBox, forceBox, lostField,
    ],
  };
}

/** Formats devices. Resolves to their paths, or to null if nothing was formatted. */
export async function makeDevices() {
  const form = fields();
  const done = await confirm({
    title: "Format devices",
    action: "Format",
    danger: true,
    body: (tell) => {
      let asked = 0;
      const refuse = (why) => tell(why.split("\n").map((line) => `Refused: ${line}`), "Format", true, false);
      const changed = async () => {
        const mine = ++asked;
        if (!form.devices().length) return tell([], "Format", true);
        tell(["The devices are checked…"], "Format", true, false);
        try {
          const { lines } = await post("v1/make", form.order(true));
          if (mine !== asked) return;
          const names = form.devices().map(baseName).join(" and ");
          tell([`The present contents of ${names} are lost, and cannot be had back.`, ...sentences(lines),
            "Nothing is served yet: the next dialog registers the devices."], "Format", form.dangerous());
        } catch (e) {
          if (mine !== asked) return;
          if (!(e instanceof Refused)) throw e;
          if (e.message.includes("--wipe-dirty")) form.lostField.hidden = false;
          refuse(e.message);
        }
      };
      // The daemon reads the devices for each answer, so it is asked when a field is complete.
      for (const input of form.inputs) input.addEventListener("change", changed);
      queueMicrotask(() => tell([], "Format", true));
      return form.shown;
    },
    act: () => post("v1/make", form.order(false)),
  });
  return done ? form.devices() : null;
}
