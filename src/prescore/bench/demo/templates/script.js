for (const box of document.querySelectorAll(".tokens")) {
  const choices = [...box.querySelectorAll("select")];
  const show = () => {
    const wanted = Object.fromEntries(choices.map((choice) => [choice.dataset.choice, choice.value]));
    for (const view of box.querySelectorAll(".view")) {
      view.hidden = view.dataset.method !== wanted.method || view.dataset.layer !== wanted.layer;
    }
  };
  for (const choice of choices) choice.addEventListener("change", show);
  show();
}
