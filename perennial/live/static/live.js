"use strict";
// Brings a page up to date as events arrive, and tells when they no longer do.
(() => {
  const link = document.getElementById("link");
  const words = (seconds) => {
    const whole = Math.max(0, Math.floor(seconds));
    if (whole < 120) return `${whole} s`;
    const minutes = Math.floor(whole / 60);
    return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };
  const tick = () => {
    const now = Date.now() / 1000;
    document.querySelectorAll("time[data-since]").forEach((time) => {
      const text = words(now - Number(time.dataset.since));
      if (time.textContent !== text) time.textContent = text;
    });
  };
  // what a person has opened, chosen or reached by keyboard stays as it was
  const replace = (part, html) => {
    const active = document.activeElement;
    const place = part.contains(active) ? [...part.querySelectorAll("a, button, input, summary")].indexOf(active) : -1;
    const open = [...part.querySelectorAll("details[open][id]")].map((details) => details.id);
    const chosen = [...part.querySelectorAll("input:checked")].map((input) => input.value);
    const scrolled = [...part.querySelectorAll(".scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
    part.innerHTML = html;
    open.forEach((id) => { const details = document.getElementById(id); if (details) details.open = true; });
    part.querySelectorAll("input[type=checkbox]").forEach((input) => { input.checked = chosen.includes(input.value); });
    part.querySelectorAll(".scroll").forEach((box, index) => {
      if (scrolled[index]) [box.scrollLeft, box.scrollTop] = scrolled[index];
    });
    if (place >= 0) part.querySelectorAll("a, button, input, summary")[place]?.focus({preventScroll: true});
  };
  // screen readers are told of a new state or warning, and not of figures that grow in it
  const voice = document.getElementById("voice");
  const said = () => [...document.querySelectorAll(".state, .warnings strong")].map((part) => part.textContent);
  const cause = (text) => text.replace(/[\d.,]+/g, "#");
  let known = new Set(said().map(cause));
  const tell = () => {
    const found = said();
    const news = found.filter((text) => !known.has(cause(text)));
    if (news.length) voice.textContent = news.join(" ");
    known = new Set(found.map(cause));
  };
  const address = document.body.dataset.events;
  if (address) {
    let lost = 0;
    const events = new EventSource(address);
    const told = (text) => { link.hidden = !text; if (link.textContent !== text) link.textContent = text; };
    events.onopen = () => { lost = 0; told(""); };
    events.onerror = () => { lost = lost || Date.now(); };
    // events that come faster than a slow machine can draw are drawn once, as the newest of them says
    let waiting = {};
    let planned = false;
    const draw = () => {
      planned = false;
      const panels = waiting;
      waiting = {};
      for (const [name, html] of Object.entries(panels)) {
        const part = document.getElementById(name);
        if (part) replace(part, html);
      }
      tick();
      tell();
    };
    events.onmessage = (event) => {
      Object.assign(waiting, JSON.parse(event.data));
      if (!planned) setTimeout(draw, 0);
      planned = true;
    };
    setInterval(() => {
      if (lost && Date.now() - lost > 3000) {
        told(`No connection to the server since ${words((Date.now() - lost) / 1000)}; this is what was known then.`);
      }
    }, 1000);
  }
  setInterval(tick, 1000);
  tick();
})();
