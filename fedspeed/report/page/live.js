// Asks the server of a watched folder for changes.
const EVERY = 2000, told = {};
let tag = "";

// The HTML parts, escaped by the server; an unchanged part is kept, so that it stays open and scrolled.
function replaceParts(parts) {
  for (const place of document.querySelectorAll("[data-part]")) {
    const name = place.dataset.part;
    if (told[name] === parts[name]) continue;
    const down = place.querySelector(".tall")?.scrollTop ?? 0;
    place.innerHTML = told[name] = parts[name];
    if (down) place.querySelector(".tall")?.scrollTo(0, down);
  }
  document.title = byId("live").querySelector(".lead").textContent;
}

async function ask() {
  if (document.hidden) return;
  try {
    const answer = await fetch("data", { headers: { "If-None-Match": tag }, cache: "no-store" });
    if (answer.status !== 304) {
      if (!answer.ok) throw new Error((await answer.text()).trim());
      const { data, parts } = await answer.json();
      replaceParts(parts);
      report.update(data);
      tag = answer.headers.get("ETag");
    }
    byId("trouble").hidden = true;
  } catch (error) {
    byId("trouble").textContent = `Nothing new: fedspeed watch does not answer (${error.message}). The page shows the last state of the runs.`;
    byId("trouble").hidden = false;
  }
}

async function keepAsking() {
  if (document.documentElement.dataset.ready) await ask();
  setTimeout(keepAsking, document.documentElement.dataset.ready ? EVERY : 50);
}

document.addEventListener("visibilitychange", ask);
keepAsking();
