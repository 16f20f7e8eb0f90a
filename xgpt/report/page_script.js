"use strict";
// Draws the charts, lets tables be copied and answers be searched; the page reads the same without.
(function () {
  var root = document.documentElement;
  var all = function (selector) { return Array.prototype.slice.call(document.querySelectorAll(selector)); };

  // ---- charts: plotly figures whose colours are names of this page's variables ----
  var holder = document.getElementById("figures");
  var figures = holder ? JSON.parse(holder.textContent) : {};
  var isCoarse = window.matchMedia("(pointer: coarse)").matches;
  var isPrinting = false;

  function coloured(value, style) {
    if (typeof value === "string") {
      return value.slice(0, 2) === "--" ? style.getPropertyValue(value).trim() : value;
    }
    if (Array.isArray(value)) {  // of numbers mostly, which need no look
      return typeof value[0] === "object" && value[0] ? value.map(function (one) { return coloured(one, style); }) : value;
    }
    if (value && typeof value === "object") {
      var made = {};
      Object.keys(value).forEach(function (key) { made[key] = coloured(value[key], style); });
      return made;
    }
    return value;
  }

  function wrapped(text, width) {  // a title of an axis, in lines that a narrow screen holds
    var most = Math.max(20, Math.floor(width / 8)), lines = [""];
    text.split(" ").forEach(function (word) {
      var line = lines[lines.length - 1];
      if (line && line.length + word.length >= most) { lines.push(word); }
      else { lines[lines.length - 1] = line ? line + " " + word : word; }
    });
    return lines.join("<br>");
  }

  function draw(box) {
    var figure = figures[box.dataset.chart], style = getComputedStyle(root);
    var width = isPrinting ? Math.min(box.clientWidth || 640, 640) : box.clientWidth;
    var isNarrow = width < 480;
    box.drawnWidth = isPrinting ? 0 : width;
    var data = figure.data.map(function (trace, i) { return chosen(box, figure, coloured(trace, style), i); });
    var layout = coloured(figure.layout, style);
    if (box.choices && box.choices.x && box.choices.x.selectedIndex) {  // marks are of the first
      layout.shapes = layout.annotations = [];
      delete layout.xaxis.tickvals;
    }
    var grid = { gridcolor: style.getPropertyValue("--line").trim(),
                 zerolinecolor: style.getPropertyValue("--line").trim() };
    ["xaxis", "yaxis"].forEach(function (name) {
      var axis = layout[name] = Object.assign({}, grid, layout[name]);
      var choice = box.choices && box.choices[name.charAt(0)];
      var text = choice ? choice.value : axis.title.text;
      axis.title = { text: wrapped(text, name === "xaxis" ? width - (layout.yaxis.type === "category" ? 230 : 80) : layout.height - 60), standoff: 8,
                     font: { size: 12, color: style.getPropertyValue("--muted").trim() } };
    });
    if (box.zoom && box.zoom.x) { layout.xaxis.range = box.zoom.x; layout.xaxis.autorange = false; }
    Object.assign(layout, {
      width: width, autosize: false, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 12, t: 34, b: 8 }, dragmode: isCoarse ? false : "zoom", hovermode: "closest",
      font: { family: getComputedStyle(document.body).fontFamily, size: isNarrow ? 11 : 12,
              color: style.getPropertyValue("--ink").trim() },
      hoverlabel: { bgcolor: style.getPropertyValue("--surface").trim(),
                    bordercolor: style.getPropertyValue("--muted").trim(), align: "left", namelength: -1,
                    font: { color: style.getPropertyValue("--ink").trim(), size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style.getPropertyValue("--muted").trim(),
                 activecolor: style.getPropertyValue("--ink").trim() },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.01, yanchor: "bottom", font: { size: 11 } } });
    return Plotly.react(box, data, layout, {
      displaylogo: false, displayModeBar: isPrinting || isCoarse || isNarrow ? false : "hover", doubleClick: "reset+autosize",
      showSendToCloud: false, showEditInChartStudio: false,
      modeBarButtonsToRemove: ["lasso2d", "select2d", "sendDataToCloud"],
      toImageButtonOptions: { filename: box.dataset.chart, scale: 2 } });
  }

  function chosen(box, figure, trace, place) {
    ["x", "y"].forEach(function (axis) {
      var choice = box.choices && box.choices[axis];
      if (choice) { trace[axis] = figure.columns[place][choice.value]; }
    });
    return trace;
  }

  function offer(box, figure) {  // what either axis may show
    box.choices = {};
    Object.keys(figure.choices).forEach(function (axis) {
      var label = document.createElement("label"), select = document.createElement("select");
      label.textContent = (axis === "x" ? "across " : "up ");
      figure.choices[axis].forEach(function (name) {
        var option = document.createElement("option");
        option.value = option.textContent = name;
        select.appendChild(option);
      });
      select.addEventListener("change", function () { draw(box); });
      label.appendChild(select);
      box.parentNode.insertBefore(label, box);
      label.className = "choose";
      box.choices[axis] = select;
    });
  }

  var boxes = all("[data-chart]").filter(function (box) { return figures[box.dataset.chart]; });
  function redraw() { boxes.forEach(draw); }
  if (window.Plotly) {
    boxes.forEach(function (box) {
      box.classList.add("drawn");
      offer(box, figures[box.dataset.chart]);
      draw(box);
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    var print = window.matchMedia("print");
    function toPrint(is) {
      isPrinting = is;
      root.classList.toggle("printing", is);
      redraw();
    }
    print.addEventListener("change", function (event) { toPrint(event.matches); });
    window.addEventListener("beforeprint", function () { toPrint(true); });
    window.addEventListener("afterprint", function () { toPrint(false); });
    var later = 0;
    function drawLater() {
      clearTimeout(later);
      later = setTimeout(function () {  // a chart that is drawn anew must not start this again
        boxes.filter(function (box) { return box.clientWidth !== box.drawnWidth; }).forEach(draw);
      }, 120);
    }
    window.addEventListener("resize", drawLater);
    if (window.ResizeObserver) {  // a scroll bar that comes, or a frame, changes no window
      var watch = new ResizeObserver(drawLater);
      boxes.forEach(function (box) { watch.observe(box); });
    }
  }

  // ---- tables that can be copied, as a spreadsheet takes them ----
  function cells(table) {
    return Array.prototype.map.call(table.rows, function (row) {
      return Array.prototype.map.call(row.cells, function (cell) {
        return cell.textContent.replace(/\s+/g, " ").trim();
      }).join("\t");
    }).join("\n");
  }
  function copy(text, button) {
    var tell = function (word) {
      button.textContent = word;
      setTimeout(function () { button.textContent = "Copy"; }, 1500);
    };
    var byHand = function () {
      var area = document.createElement("textarea");
      area.value = text;
      document.body.appendChild(area);
      area.select();
      tell(document.execCommand("copy") ? "Copied" : "Not allowed here");
      area.remove();
    };
    if (navigator.clipboard) {
      navigator.clipboard.writeText(text).then(function () { tell("Copied"); }, byHand);
    } else { byHand(); }
  }
  all("table").forEach(function (table) {
    var button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", function () { copy(cells(table), button); });
    var fold = table.closest("details"), section = table.closest("section");
    var before = fold ? fold.querySelector("summary").nextSibling : section && section.querySelector("h2");
    if (before) { before.parentNode.insertBefore(button, before); }
  });

  // ---- the answers, by what is typed ----
  var search = document.getElementById("search"), count = document.getElementById("search-count");
  var cards = all(".answer"), more = document.getElementById("more");
  if (!search || !count || !cards.length) { return; }
  var texts = cards.map(function (card) { return card.textContent.toLowerCase(); });
  search.parentNode.hidden = false;
  search.addEventListener("input", function () {
    var wanted = search.value.trim().toLowerCase(), shown = 0;
    cards.forEach(function (card, i) {
      var isMatch = texts[i].indexOf(wanted) !== -1;
      card.hidden = !isMatch;
      shown += isMatch ? 1 : 0;
    });
    if (more) { more.open = Boolean(wanted); }
    count.textContent = wanted ? shown + " of " + cards.length : "";
  });
})();
