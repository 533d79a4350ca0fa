// The page: header, sections, and the list of sections on top.

function start() {
  setUpTheme();
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  document.title = `${plain(data.title)} – hacrl report`;
  main.replaceChildren(el("header", {}, el("p", { class: "eyebrow" }, data.kind === "study" ? "Study" : "Training run"), el("h1", {}, data.title),
    data.kind === "study" ? studyFacts(data.study) : runFacts(data.run)));
  if (data.kind === "study") renderStudy(main, data.study, data.rollouts, data.max_mb);
  else {
    renderRun(main, data.run);
    renderRollouts(main, data.run, 0, data.rollouts[0], data.max_mb);
    renderSettings(main, data.run);
  }
  renderNavigation(main);
}

function renderNavigation(main) {
  const nav = document.getElementById("nav");
  const short = { result: "Result", learning: "Learning", capability: "Capability", overlap: "Ratio", kept: "Kept", sources: "Sources", agreement: "Agreement", time: "Time", lost: "Lost", rollouts: "Rollouts", settings: "Settings", failed: "Failed", differences: "Differences", cost: "Cost", run: "One run" };
  const links = new Map();
  for (const node of main.querySelectorAll(":scope > section")) {
    const link = el("a", { href: `#${node.id}` }, short[node.id]);
    nav.append(link);
    links.set(node, link);
  }
  const spy = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) {
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const node of links.keys()) spy.observe(node);
}

start();
