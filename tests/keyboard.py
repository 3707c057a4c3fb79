"""Is everything in a part of a page reached and used with the keyboard alone, and without sight?

`keyboard_problems` walks through it with the Tab key in both directions, and then uses each slider, button and list.
Clicks are caught before the page sees them, so nothing is started. `axe_problems` asks axe.
"""

import itertools
import time

# What is to be reached gets a number. What is a button for the pointer must be one for the keyboard too.
_MARK = """scope => {
    const looks = e => { const s = getComputedStyle(e);
        return [s.outlineStyle, s.outlineWidth, s.boxShadow, s.borderColor, s.backgroundColor].join(); };
    const focusable = 'a[href], button, input, select, textarea, summary, [tabindex]';
    const shown = e => e.checkVisibility({ visibilityProperty: true }) && e.getClientRects().length &&
        !e.closest('[inert]');
    const name = e => (e.ariaLabel || e.labels?.[0]?.textContent || e.innerText || e.title || '').trim();
    const says = e => `${e.tagName.toLowerCase()} “${name(e).slice(0, 40)}”`;
    const problems = [], names = [];
    window.walked = [];
    document.activeElement.blur();
    // of a list whose elements share one place in the order, the arrow keys reach the others
    const shared = e => [...(e.closest('ol, ul')?.querySelectorAll(e.tagName) ?? [])].some(one => one.tabIndex >= 0);
    for (const e of scope.querySelectorAll(focusable)) {
        if (!shown(e) || e.disabled || e.type === 'hidden') continue;
        if (e.tabIndex < 0) {
            const own = e.matches('a, button, input, select, textarea');
            if (own && !shared(e)) problems.push(`out of order: ${says(e)}`);
            continue;
        }
        e.dataset.walk = walked.length;
        walked.push({ e, before: looks(e) });
        names.push(says(e));
        if (!name(e)) problems.push(`without a name: ${e.outerHTML.slice(0, 120)}`);
    }
    for (const e of scope.querySelectorAll('*')) {
        const [own, around] = [e, e.parentElement].map(one => getComputedStyle(one).cursor);
        const button = own === 'pointer' && around !== 'pointer' && shown(e);
        if (button && !e.closest(`label, option, ${focusable}`) && !e.querySelector(focusable)) {
            problems.push(`for the pointer only: ${e.outerHTML.slice(0, 120)}`);
        }
    }
    window.looks = looks;
    window.clicks = 0;
    window.caught = event => { clicks++; event.stopImmediatePropagation(); event.preventDefault(); };
    return { names, problems };
}"""
_START = "scope => { scope.tabIndex = -1; scope.focus({ preventScroll: true }); scope.removeAttribute('tabindex'); }"
_HERE = """scope => {
    const e = document.activeElement;
    if (!e || !scope.contains(e)) return null;
    const box = e.getBoundingClientRect(), number = Number(e.dataset.walk ?? -1);
    return { number, marked: number < 0 || looks(e) !== walked[number].before,
        seen: box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth };
}"""
_MOVED = {
    "[role=slider], input[type=range]": ("ArrowRight", "ArrowLeft"),
    "select:has(option:enabled + option:enabled)": ("ArrowDown", "ArrowUp"),
}
# One question about an element, because between two of them a late answer may make it again.
_FOCUS = """(scope, number) => {
    const e = scope.querySelector(`[data-walk="${number}"]`);
    e?.focus();
    return Boolean(e);
}"""
_STATE = """(scope, number) => {
    const e = scope.querySelector(`[data-walk="${number}"]`);
    return e && { focused: e === document.activeElement, value: e.getAttribute('aria-valuetext') ?? e.value };
}"""


def keyboard_problems(page, scope):
    """What cannot be done in the element `scope`, a locator, with the keyboard; [] where all can."""
    found = scope.evaluate(_MARK)
    names, problems = found["names"], found["problems"]
    scope.evaluate(_START)
    visited = _walk(page, scope, "Tab", names, problems)
    problems += [f"not reached with Tab: {name}" for number, name in enumerate(names) if number not in visited]
    if visited:  # back from the last element to the first
        scope.locator(f"[data-walk='{visited[-1]}']").focus()
        back = [visited[-1], *_walk(page, scope, "Shift+Tab", names, [])]
        problems += [f"not reached with Shift+Tab: {names[one]}" for one in set(visited) - set(back)]
    problems += _used(page, scope, names)
    scope.evaluate("scope => scope.querySelectorAll('[data-walk]').forEach(e => delete e.dataset.walk)")
    return problems


def _walk(page, scope, key, names, problems):
    """The numbers of the elements that have the focus one after the other, until it leaves the scope."""
    visited = []
    for _ in range(2 * len(names) + 10):
        page.keyboard.press(key)
        here = scope.evaluate(_HERE)
        if here is None:
            return visited
        if here["number"] >= 0:
            visited.append(here["number"])
            name = names[here["number"]]
            problems += [f"no sign that it has the focus: {name}"] * (not here["marked"])
            problems += [f"outside of the screen while it has the focus: {name}"] * (not here["seen"])
    problems.append(f"the focus never leaves with {key}")
    return visited


def _used(page, scope, names):
    """Sliders and lists that the arrow keys do not move, buttons that Enter or Space does not press, and keys that take
    the focus away."""
    problems = []

    def press(number, key):
        """Press a key on an element; returns its value after that, or "made again" if a late answer has replaced it."""
        if scope.evaluate(_FOCUS, number):
            page.keyboard.press(key)
        state = scope.evaluate(_STATE, number)
        if state is None:
            return "made again"
        problems.extend([f"loses the focus with {key}: {names[int(number)]}"] * (not state["focused"]))
        return state["value"]

    def numbers_of(kind):
        return scope.locator(f"[data-walk]:is({kind})").evaluate_all("all => all.map(e => e.dataset.walk)")

    page.evaluate("() => addEventListener('click', caught, true)")
    for number in numbers_of("button, [role=button]"):
        for key in ("Enter", "Space"):
            before = page.evaluate("clicks")
            there = press(number, key) != "made again"
            problems += [f"not pressed by {key}: {names[int(number)]}"] * (there and page.evaluate("clicks") == before)
    page.evaluate("() => removeEventListener('click', caught, true)")
    for kind, keys in _MOVED.items():  # the lists come last, because a choice may make what is shown again
        for number in numbers_of(kind):
            state = scope.evaluate(_STATE, number)
            if state is None:
                continue
            moved = []
            deadline = time.monotonic() + 30
            for key, back in itertools.cycle((keys, keys[::-1])):
                moved.append(press(number, key))
                if moved[-1] != state["value"]:
                    press(number, back)
                    break
                if time.monotonic() > deadline:
                    break
                if len(moved) % 2 == 0:  # the answer to an earlier key may have set it back, or left it one choice
                    page.wait_for_timeout(500)
            problems += [f"not moved by the arrow keys: {names[int(number)]}"] * (set(moved) == {state["value"]})
    return problems


def axe_problems(page, context=None, impacts=None):
    """(rule, HTML) of each element in which axe finds a fault, of these impacts only."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context=context).response["violations"]
    found = [one for one in found if impacts is None or one["impact"] in impacts]
    return [(one["id"], node["html"][:200]) for one in found for node in one["nodes"]]
