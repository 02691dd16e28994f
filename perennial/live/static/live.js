"use strict";
// Asks for the page every two seconds and puts what has changed in place; says when no answer comes.
(() => {
  const EVERY = 2000, LOST = 3000;
  const words = (seconds) => {
    const whole = Math.max(0, Math.floor(seconds));
    if (whole < 120) return `${whole} s`;
    const minutes = Math.floor(whole / 60);
    return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };
  const tick = () => document.querySelectorAll("time[data-since]").forEach((time) => {
    const text = words(Date.now() / 1000 - Number(time.dataset.since));
    if (time.textContent !== text) time.textContent = text;
  });
  // what a person has opened or reached by keyboard stays as it was
  const replace = (part, html) => {
    const controls = "a, button, summary, [tabindex]";
    const place = [...part.querySelectorAll(controls)].indexOf(document.activeElement);
    const open = [...part.querySelectorAll("details[open][id]")].map((details) => details.id);
    const scrolled = [...part.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
    part.innerHTML = html;
    open.forEach((id) => { const details = document.getElementById(id); if (details) details.open = true; });
    part.querySelectorAll(".scroll").forEach((box, index) => {
      if (scrolled[index]) [box.scrollLeft, box.scrollTop] = scrolled[index];
    });
    if (place >= 0) part.querySelectorAll(controls)[place]?.focus({preventScroll: true});
  };
  // screen readers are told of a new state or warning, and not of figures that grow in it
  const said = () => [...document.querySelectorAll(".state, .warnings strong")].map((part) => part.textContent);
  const cause = (text) => text.replace(/[\d.,]+/g, "#");
  let known = new Set(said().map(cause));
  const tell = () => {
    const found = said(), news = found.filter((text) => !known.has(cause(text)));
    if (news.length) document.getElementById("voice").textContent = news.join(" ");
    known = new Set(found.map(cause));
  };
  const shown = new Map([...document.querySelectorAll("section[id]")].map((part) => [part.id, part.innerHTML]));
  const link = document.getElementById("link");
  let heard = Date.now();
  const ask = async () => {
    try {
      const answer = await fetch(location.href, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      page.querySelectorAll("section[id]").forEach((part) => {
        const old = document.getElementById(part.id);
        if (old && shown.get(part.id) !== part.innerHTML) replace(old, part.innerHTML);
        shown.set(part.id, part.innerHTML);
      });
      heard = Date.now();
      tell();
    } catch { /* said below */ }
    setTimeout(ask, EVERY);
  };
  setInterval(() => {
    tick();
    const silent = Date.now() - heard - EVERY;
    const text = silent > LOST ? "No connection to the server; this is what was known before." : "";
    link.hidden = !text;
    if (link.textContent !== text) link.textContent = text;
  }, 1000);
  if (shown.size) setTimeout(ask, EVERY);
  tick();
})();
