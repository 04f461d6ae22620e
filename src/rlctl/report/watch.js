// Renews what has changed in a page that is served, and keeps open folds, the place and the focus as they are.
const every = 2000, told = document.querySelector("[role=status]").cloneNode();
told.removeAttribute("role"); told.id = "live"; document.querySelector("main").prepend(told);
let tag = "";
const focusable = part => [part, ...part.querySelectorAll("*")].filter(one => one.matches("summary,[tabindex]"));
function replace(old, fresh) {
  const folds = part => [part, ...part.querySelectorAll("details")].filter(one => one.matches("details"));
  const title = one => one.querySelector("summary").textContent;
  const open = new Set(folds(old).filter(one => one.open).map(title));
  const at = focusable(old).indexOf(document.activeElement), scrolled = focusable(old).map(one => one.scrollLeft);
  old.replaceWith(fresh);
  for (const one of folds(fresh)) if (open.has(title(one))) one.open = true;
  focusable(fresh).forEach((one, place) => { one.scrollLeft = scrolled[place] || 0; });
  if (at >= 0 && focusable(fresh)[at]) focusable(fresh)[at].focus({preventScroll: true});
}
const sources = new Map();
function update(next) {
  document.title = next.title;
  const main = document.querySelector("main"), parts = [...next.querySelectorAll("main > *")];
  const name = part => part.id || part.tagName, names = new Set(parts.map(name));
  let before = told;
  for (const part of parts) {
    const source = part.outerHTML, old = [...main.children].find(one => one !== told && name(one) === name(part));
    let now = old;
    if (!old) { now = part; before.after(part); }
    else if (sources.get(name(part)) !== source) { now = part; replace(old, part); }
    sources.set(name(part), source);
    before = now;
  }
  for (const old of [...main.children]) if (old !== told && !names.has(name(old))) old.remove();
}
async function look() {
  try {
    const answer = await fetch("/", {headers: tag ? {"If-None-Match": tag} : {}, cache: "no-store"});
    if (answer.status === 200) {
      update(new DOMParser().parseFromString(await answer.text(), "text/html"));
      tag = answer.headers.get("ETag");
    }
    told.textContent = answer.ok || answer.status === 304 ? "This page keeps itself up to date." : await answer.text();
  } catch { told.textContent = "rlctl watch does not answer any more: the page shows what it last said."; }
  setTimeout(look, every);
}
look();
