"""The walk with the keyboard (`keyboard.py`) finds what a page lacks."""

import pytest
from keyboard import keyboard_problems

GOOD = """<button>Play</button><label>steps <input type=range></label><select aria-label=loss><option>grpo</select>
<select aria-label=level><option>token<option selected>answer</select>
<ol><li><button>a</button><button tabindex=-1>b</button></ol><p tabindex=0 aria-label=text>long</p>"""
FAULTS = {
    "<button><i></i></button>": "without a name",
    "<button tabindex=-1>Play</button>": "out of order",
    "<div style='cursor:pointer'>Play</div>": "for the pointer only",
    "<button style='outline:none'>Play</button>": "no sign that it has the focus",
    "<button style='position:absolute;left:-999px'>Play</button>": "outside of the screen",
    "<button onkeydown='event.preventDefault()'>Play</button>": "never leaves",
    "<button onkeydown='if (event.key === `Enter`) event.preventDefault()'>Play</button>": "not pressed by Enter",
    "<label>steps <input type=range onkeydown='if (event.key !== `Tab`) event.preventDefault()'></label>": "not moved",
    "<button onkeydown='if (event.key === ` `) this.blur()'>Play</button>": "loses the focus with Space",
    "<select aria-label=a onkeydown='if (event.key !== `Tab`) event.preventDefault()'><option>1<option>2</select>": (
        "not moved"
    ),
    "<button onfocus='this.blur()'>Play</button>": "not reached with Tab",
}


@pytest.mark.long
@pytest.mark.browser
def test_each_fault_is_found_and_a_good_page_has_none(browser):
    page = browser.new_page()

    def problems(html):
        page.set_content(f"<button>before</button><main>{html}</main><button>after</button>")
        return keyboard_problems(page, page.locator("main"))

    assert problems(GOOD) == []
    for html, words in FAULTS.items():
        assert any(words in problem for problem in problems(f"{GOOD}{html}")), (html, problems(html))
    page.close()
