// The body of the `onload` handler of a dashboard's style sheet, which is `this`; hover.js follows, and reads `box`.
// A slider's handle has no name of its own, a region that screen readers follow must be there before its text, and what
// scrolls must be reached by keyboard.
const box = this.closest('.grpo-edu-dashboard');
if (!box || box.dataset.named) return;
box.dataset.named = 1;

// A dashboard that was started in the cell of the cursor, or in the one before it, comes into view as a whole.
const cell = box.closest('.jp-Cell'), active = document.querySelector('.jp-Notebook-cell.jp-mod-active');
if (cell && (cell === active || cell.nextElementSibling === active)) {
  const show = () => box.scrollIntoView({block: box.offsetHeight > innerHeight - 150 ? 'start' : 'nearest'});
  setTimeout(show, 150);
}

// In JupyterLab a key in a list would be a shortcut: an arrow chooses another cell, and x removes this one. So only
// Shift+Enter and keys with Ctrl, Alt or Cmd reach the notebook.
box.addEventListener('keydown', event => {
  const shortcut = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey && event.key === 'Enter';
  if (!shortcut) event.stopPropagation();
});

// Where the kernel was restarted or has ended, the page knows it, and Python can say nothing any more.
const LOST = 'This dashboard has lost its Python, because the kernel was restarted or has ended. Nothing here goes on. ' +
  'Run the cell again; training runs that were kept are then offered.';
const showLost = () => {
  const lost = box.classList.contains('jupyter-widgets-disconnected') && !document.body.dataset.voila;
  const line = box.querySelector('.grpo-edu-lost');
  if (!lost && line) line.remove();
  const columns = box.querySelector('.grpo-edu-columns');
  if (!columns) return;
  columns.inert = lost;
  if (!lost || line) return;
  const alert = document.createElement('div');
  alert.className = 'grpo-edu-lost';
  alert.setAttribute('role', 'alert');
  alert.textContent = LOST;
  columns.before(alert);
};

// Progress is drawn after each step; a screen reader is told of each stage, and of each quarter of it.
const told = document.createElement('div');
told.setAttribute('aria-live', 'polite');
told.style.cssText = 'position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)';
box.append(told);
let stage = '';

const name = () => {
  showLost();
  for (const slider of box.querySelectorAll('.widget-slider')) {
    const text = slider.querySelector('.widget-label')?.textContent || 'value';
    slider.querySelector('.noUi-handle')?.setAttribute('aria-label', text);
    const number = slider.querySelector('.widget-readout');
    number?.setAttribute('role', 'textbox');
    number?.setAttribute('aria-label', text + ', as a number');
  }
  for (const button of box.querySelectorAll('.grpo-edu-buttons .widget-button'))
    button.setAttribute('aria-disabled', button.classList.contains('grpo-edu-off'));
  for (const status of box.querySelectorAll('.grpo-edu-message .widget-html-content'))
    status.setAttribute('aria-live', 'polite');
  const bar = box.querySelector('progress[aria-label]');
  const now = bar ? bar.getAttribute('aria-label') + Math.floor(bar.value / 25) : '';
  if (now !== stage) told.textContent = bar?.nextElementSibling.textContent ?? '';
  stage = now;
  for (const part of box.querySelectorAll('.grpo-edu-stage .widget-html-content')) {
    const wide = part.scrollWidth > part.clientWidth;
    if (wide) part.tabIndex = 0;
    else part.removeAttribute('tabindex');
    if (part.classList.contains('grpo-edu-wider') !== wide) part.classList.toggle('grpo-edu-wider', wide);
  }
};
name();
new MutationObserver(name).observe(box, {childList: true, subtree: true, attributeFilter: ['class']});
new ResizeObserver(name).observe(box);
