// The dialog before every change: what will happen, and two buttons, of which the harmless one has the focus.

import { Refused } from "./api.js";
import { el, prose } from "./format.js";

const dialog = () => document.getElementById("ask");

/**
 * Shows the dialog; `act` is done when it is confirmed. Resolves to whether it was done. `sentences` say what will happen, or
 * `body` makes fields and gets a function that says it: `(sentences, name of the action, whether it is dangerous, whether it is
 * possible)`; without sentences there is nothing to do yet.
 */
export function confirm({ title, body, sentences, action, danger = false, act, focus = null }) {
  const box = dialog();
  const error = el("p", { class: "banner bad", role: "alert", hidden: true });
  const list = el("ul", { class: "says" });
  const will = el("div", { class: "will", "aria-live": "polite" }, el("h3", {}, "What will happen"), list);
  const tell = (some) => {
    list.replaceChildren(...some.map((s) => el("li", {}, typeof s === "string" ? prose(s) : s)));
    will.hidden = !some.length;
  };
  const go = el("button", { type: "submit", class: danger ? "danger" : "main" }, action);
  const fields = body ? body((some, name, dangerous, possible = some.length > 0) => {
    tell(some);
    if (name) go.textContent = name;
    go.className = dangerous || danger ? "danger" : "main";
    go.disabled = !possible;
  }) : [];
  if (sentences) tell(sentences);
  const cancel = el("button", { type: "button", onclick: () => box.close("no") }, "Cancel");
  const form = el("form", { method: "dialog" }, el("h2", { id: "ask-title" }, title), fields, will, error, el("div", { class: "buttons" }, cancel, go));
  box.replaceChildren(form);
  return new Promise((done) => {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (go.disabled) return;
      go.disabled = true;
      error.hidden = true;
      try {
        await act();
        box.close("yes");
      } catch (e) {
        error.replaceChildren(...prose(e instanceof Refused ? e.message : `unexpected: ${e.message}`));
        error.hidden = false;
        go.disabled = false;
        error.scrollIntoView({ block: "nearest" });
      }
    });
    box.addEventListener("close", () => done(box.returnValue === "yes"), { once: true });
    box.returnValue = "no";
    box.showModal();
    // Enter without a look does nothing. A field takes the focus only where nothing is changed by it.
    (focus ?? cancel).focus();
  });
}

/** A field with its label and a line of explanation. */
export function field(id, label, input, note = "") {
  input.id = id;
  return el("div", { class: "field" }, el("label", { htmlFor: id }, label), input, note && el("span", { class: "quiet small" }, note));
}
