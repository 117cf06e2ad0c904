// Markdown as DOM nodes. A model's words reach the document as text nodes only: nothing here reads them as markup.

const LONGEST_INLINE = 20000;  // characters of a paragraph; above, it stays plain, so that a hostile one costs no time
const LONGEST_MARK = 1000;  // characters of a line that is a heading, a fence or a table's rule, for the same reason
const DEEPEST = 6;  // lists and quotes within each other

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// Each alternative is bounded, so that matching takes time linear in the text. ht{2}p: no address stands in this page.
const INLINE = new RegExp([
  /(`{1,3})(?!`)([^`]{1,2000})\1(?!`)/,
  /(?<![\w*])\*(?=[^\s*]|\*\*[^\s*])((?:[^*\n]|\*\*[^*\n]{1,500}\*\*){1,500})\*(?![\w*])/,
  /\*\*(?=\S)((?:[^*]|\*(?!\*)|\*(?=\*\*(?!\*))){1,500})\*\*/,
  /(?<![\w.])__(?=[^\s_])((?:[^_]|_(?!_)){1,500})(?<=[^\s_])__(?![\w(]|\.\w)/,  // not x.__init__()
  /(?<!\w)_(?=[^\s_])([^_\n]{1,500})_(?!\w)/,
  /~~(?=\S)([^~]{1,500})~~/,
  /\[([^\]\n]{1,300})\]\((ht{2}ps?:\/\/(?:[^\s()]|\([^\s()]{0,99}\)){1,2000})\)/,
  /(ht{2}ps?:\/\/(?:[^\s<>"'`()\]]|\([^\s<>"'`()]{0,99}\)){1,2000}(?<![.,;:!?]))/,
  /\\([\\`*_{}\[\]()#+.!|~>-])/,
].map(part => part.source).join("|"), "g");

function inline(text, depth = 0) {
  if (text.length > LONGEST_INLINE || depth > DEEPEST) return [text];
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, italic, bold, strong, slanted, struck, label, address, bare, escaped] = found;
    if (found.index > end) nodes.push(text.slice(end, found.index));
    end = found.index + whole.length;
    if (code !== undefined) nodes.push(make("code", {dir: "ltr"}, code));
    else if (bold ?? strong) nodes.push(make("strong", {}, ...inline(bold ?? strong, depth + 1)));
    else if (italic ?? slanted) nodes.push(make("em", {}, ...inline(italic ?? slanted, depth + 1)));
    else if (struck !== undefined) nodes.push(make("s", {}, ...inline(struck, depth + 1)));
    else if (address ?? bare) nodes.push(link(label ?? bare, address ?? bare));
    else nodes.push(escaped);
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

/** A label is followed by the host's name, so that it cannot hide where the link leads. */
function link(label, address) {
  const text = label === address ? label : `${label} (${address.split("/")[2]})`;
  return make("a", {href: address, title: address, target: "_blank", rel: "noopener noreferrer"}, text);
}

function codeBlock(text, language) {
  const copying = make("button", {type: "button", onclick: () => copy(text, copying)}, "copy");
  return make("div", {class: "code", dir: "ltr"}, make("header", {}, make("span", {}, language || "code"), copying),
              make("pre", {tabindex: "0"}, make("code", {}, text)));
}

async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no secure context: the older way
    const field = make("textarea", {class: "unseen"});
    field.value = text;
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = done ? "copied" : "not copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

// With the flag s, `.*` takes any rest of a line: a "\u2028" in it would end the match, and every shorter one be tried.
const FENCE = /^ {0,3}(`{3,}|~{3,}(?!~))([^`]*)$/;
const ITEM = /^(\s{0,20})([-*+]|\d{1,9}[.)])\s+(.*)$/s;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/s;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const UNDERLINE = /^ {0,3}(={2,}|-{2,})\s*$/;  // of a heading; one sign may become a list's item in a growing answer
const RULED = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/s;
const short = (pattern, line) => (line.length > LONGEST_MARK ? null : pattern.exec(line));
const begins = line => short(FENCE, line) || short(HEADING, line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

/** The blocks of a text: [source, maker of the node] each. */
function blocks(text, depth = 0) {
  const lines = text.split("\n"), found = [];
  let at = 0, from = 0;
  const add = makeNode => { found.push([lines.slice(from, at).join("\n"), makeNode]); };
  const take = goesOn => {
    const taken = [];
    while (at < lines.length && goesOn(lines[at])) taken.push(lines[at++]);
    return taken;
  };
  const table = () => lines[at].includes("|") && lines[at + 1]?.includes("|") && short(RULED, lines[at + 1]);
  while (at < lines.length) {
    from = at;
    const line = lines[at], nested = depth < DEEPEST;
    let match;
    if (!line.trim()) {
      at++;
    } else if ((match = short(FENCE, line))) {
      const [, fence, language] = match;
      at++;
      const body = take(next => !(next.trim().startsWith(fence) && !next.trim().slice(fence.length).replaceAll(fence[0], "")));
      at++;  // the closing fence, which an unfinished answer has not yet
      add(() => codeBlock(body.join("\n"), language.trim().slice(0, 40)));
    } else if ((match = short(HEADING, line))) {
      const [, marks, rest] = match, title = rest.trim().replace(/(^|\s)#+$/, "").trimEnd();
      at++;
      add(() => make(`h${marks.length}`, {}, ...inline(title)));
    } else if (RULE.test(line)) {
      at++;
      add(() => make("hr"));
    } else if (nested && QUOTE.test(line)) {
      const inner = take(next => QUOTE.test(next)).map(next => QUOTE.exec(next)[1]).join("\n");
      add(() => make("blockquote", {}, ...markdown(inner, depth + 1)));
    } else if (nested && (match = ITEM.exec(line))) {
      const [, indent, mark] = match;
      const own = next => ITEM.exec(next)?.[1].length <= indent.length;
      const items = [];
      while (at < lines.length && own(lines[at]) && /\d/.test(ITEM.exec(lines[at])[2]) === /\d/.test(mark)) {
        const first = ITEM.exec(lines[at++]);
        const rest = take((next) => !own(next) && (/^\s+\S/.test(next) || (!next.trim() && /^\s+\S/.test(lines[at + 1] ?? ""))));
        const width = Math.min(...rest.filter(next => next.trim()).map(next => next.search(/\S/)), 1000);
        items.push([first[3], ...rest.map(next => next.slice(width))].join("\n"));
        if (at + 1 < lines.length && !lines[at].trim() && own(lines[at + 1])) at++;  // a loose list
      }
      const ordered = /\d/.test(mark);
      add(() => make(ordered ? "ol" : "ul", ordered ? {start: parseInt(mark)} : {},
                     ...items.map(item => make("li", {}, ...markdown(item, depth + 1, true)))));
    } else if (table()) {
      const rows = take(next => next.includes("|")).map(row => row.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/));
      const [head, , ...body] = rows, plain = cell => cell.trim().replaceAll("\\|", "|");
      const cells = (row, tag) => make("tr", {}, ...row.map(cell => make(tag, {}, ...inline(plain(cell)))));
      add(() => make("div", {class: "wide"}, make("table", {}, make("thead", {}, cells(head, "th")),
                                                  make("tbody", {}, ...body.map(row => cells(row, "td"))))));
    } else {
      at++;
      const more = take(next => next.trim() && !begins(next) && !UNDERLINE.test(next) && !table());
      const under = UNDERLINE.exec(lines[at] ?? "")?.[1][0], words = [line, ...more].join("\n");
      if (under) at++;
      add(() => (under ? make(under === "=" ? "h1" : "h2", {}, ...inline(words)) : make("p", {dir: "auto"}, ...inline(words))));
    }
  }
  return found;
}

/** `tight`: the first paragraph of a list's item is no paragraph. */
function markdown(text, depth = 0, tight = false) {
  const nodes = blocks(text, depth).map(([, makeNode]) => makeNode());
  if (tight && nodes[0]?.tagName === "P") nodes.splice(0, 1, ...nodes[0].childNodes);
  return nodes;
}

/** Shows a growing text in `box`: blocks that are as they were keep their nodes, and with them a reader's selection. */
function show(box, text) {
  const wanted = blocks(text);
  wanted.forEach(([source, makeNode], i) => {
    const old = box.children[i];
    if (old?.source === source) return;
    const node = makeNode();
    node.source = source;
    if (old) old.replaceWith(node);
    else box.append(node);
  });
  while (box.children.length > wanted.length) box.lastElementChild.remove();
}
