"""Which final answers are right: a table of the rule, from completion to grade."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from topd.tasks.grading import Grader, Rule
from topd.tasks.scorers import exact, math_verify
from topd.tasks.task import Problem

ROWS = [
    # the last box counts, and nothing beside it
    ("20", r"I get \boxed{18}. Wait, I forgot the tax. So the answer is \boxed{20}.", 1),
    ("18", r"I get \boxed{18}. Wait, I forgot the tax. So the answer is \boxed{20}.", 0),
    ("18", r"\boxed{18}, \boxed{20}", 0),
    ("20", r"\boxed{18} or \boxed{20}", 1),
    (r"\{18,20\}", r"\boxed{18} and \boxed{20}", 0),
    ("18", r"\boxed{18} but actually \boxed{", 0),
    ("18", r"\boxed{18} but actually \boxed{}", 0),
    ("18", r"\boxed{18} but actually \boxed{20", 0),
    ("5", r"the value 5 \boxed{}", 0),
    ("8", r"with x = 8 we get \boxed{x}", 0),
    ("8", r"x = 8, so \boxed{x = 8}", 1),
    ("1/2", r"\boxed{\frac{1}{2}}", 1),
    ("1/2", r"\boxed{ \dfrac{1}{2} }", 1),
    ("5", r"\boxed{\boxed{5}}", 1),
    ("5", r"\fbox{5}", 1),
    ("7", r"\boxed{7}. Check: 3 + 4 = 9.", 1),
    ("5", r"\boxed 5", 0),
    (r"\{1,2\}", r"\boxed{\{2, 1\}}", 1),
    ("4", "<think>\\boxed{3}</think> It is \\boxed{4}.", 1),
    ("3", "<think>\\boxed{3}</think> It is unclear", 0),
    ("3", "<think>perhaps \\boxed{3}", 0),
    # without a box: tags, then a marker, then the last line
    ("42", "<answer>42</answer>", 1),
    ("42", "<answer>41</answer> no <answer>42</answer>", 1),
    ("42", "<answer>42</answer> no <answer>43", 0),
    ("42", "<answer></answer> 42", 0),
    ("42", "<answer>\\boxed{42}</answer>", 1),
    ("72", "48 + 24 = 72\n#### 72", 1),
    ("72", "#### 72\n#### 71", 0),
    ("42", "答案是42", 1),
    ("42", "The answer is 42. I hope this helps!", 1),
    ("42", "**Answer:** 42", 1),
    ("42", "The final answer is:\n\n**42**", 1),
    ("7", "The answer is not 5 but 7", 0),
    ("100", "10, 20, 100", 0),
    ("5", "I think of 5\nbut I do not know", 0),
    ("8", "7, not 8", 0),
    ("7", "3 + 4 = 7", 1),
    ("3", "3 + 4 = 7", 0),
    ("12", "12", 1),
    ("", "", 0),
    ("5", "   \n ", 0),
    # choices and words
    ("A", "The answer is (A)", 1),
    ("B", "The correct answer is option B.", 1),
    ("A", "The answer is (B)", 0),
    ("C", r"\boxed{\text{C}}", 1),
    ("Yes", "yes.", 1),
    ("Yes", "No", 0),
    (r"\text{no solution}", r"\boxed{\text{No solution}}", 1),
    ("listen", r"\boxed{silent}", 0),
    # numbers are what they say
    ("0.00001", r"\boxed{0.00001}", 1),
    ("0.00001", r"\boxed{10^{-5}}", 1),
    ("1e-5", r"\boxed{0.00001}", 1),
    ("1e16", r"\boxed{10000000000000000}", 1),
    ("1e3", r"\boxed{1000}", 1),
    ("1000", r"\boxed{1e3}", 1),
    ("1.10", r"\boxed{1.1}", 1),
    ("0.0000001", r"\boxed{0.0000002}", 0),
    ("12345678901234567890", r"\boxed{12345678901234567891}", 0),
    ("16", r"\boxed{016}", 1),
    ("1,000", r"\boxed{1000}", 1),
    ("1000", r"\boxed{1,000}", 1),
    ("1000", r"\boxed{1{,}000}", 1),
    ("3", r"\boxed{3.}", 1),
    ("-3", r"\boxed{- 3}", 1),
    ("-3", "\\boxed{\u22123}", 1),
    ("1 1/2", r"\boxed{1.5}", 1),
    ("1", r"\boxed{1 1/2}", 0),
    ("1/3", r"\boxed{0.33}", 0),
    ("3.14", r"\boxed{\pi}", 0),
    # what is written around a number
    ("42", "\\boxed{\uff14\uff12}", 1),
    ("72", r"\$72", 1),
    ("72", r"\boxed{\$72}", 1),
    ("5", r"\boxed{5\text{ cm}}", 1),
    ("5 cm", r"\boxed{5}", 1),
    ("5", "The answer is 5 apples.", 1),
    ("5", r"\(5\)", 1),
    ("90", r"\boxed{90^\circ}", 1),
    ("10", r"\boxed{10\%}", 1),
    ("0.1", r"\boxed{10\%}", 1),
    ("0.1", r"\boxed{10}", 0),
    # mathematics
    ("x^2+1", r"\boxed{1+x^2}", 1),
    ("(1,2)", r"\boxed{[1,2)}", 0),
    ("6", r"\boxed{5 \text{ or } 6}", 0),
    ("x<2", r"\boxed{2>x}", 1),
    ("27", "no number at all", 0),
    (r"\boxed{20}", r"\boxed{20}", 1),
    # without a box: what instruct models write around an answer
    ("8", "The answer is\n$$\n8\n$$", 1),
    ("8", "The final answer is:\n\n\\[\n8\n\\]", 1),
    ("8", "So\n$$\nx = 8\n$$", 1),
    ("8", "The answer is:\n- 8", 1),
    ("-8", "The answer is:\n- 8", 0),
    ("-8", "The answer is:\n- -8", 1),
    ("-8", "The answer is -8", 1),
    ("8", "We add:\n- 8", 1),
    ("-8", "We add:\n-8", 1),
    ("42", "The answer is **42** apples.", 1),
    ("8", "The answer is 8.\n\n#### Explanation\nThree and five.", 1),
    ("8", "#### Step 2: Add\n3 + 5 = 8", 1),
    ("18", "#### 18 dollars", 1),
    ("18", "#### 18 dollars\n\nGood luck!", 1),
    ("A", "It is the first.\n#### A", 1),
    ("5", "Answer: 5. I hope this answer is helpful!", 1),
    ("5", "Answer: 5.\n\nExplanation: the answer is obtained by adding", 1),
    ("Mr. Smith", "The answer is Mr. Smith.", 1),
    ("5", "The answer is therefore 5.", 1),
    ("5", "The answer is equal to 5.", 1),
    ("18", "The answer is 18, as shown.", 1),
    ("5", "<Answer>5</Answer>", 1),
    ("5", "Answer: 5</s>", 1),
    ("5", "2 + 3 =\n5<|im_end|>\n", 1),
    # choices
    ("A", "Answer: A) 12", 1),
    ("A", r"\boxed{\textbf{(A)}\ 12}", 1),
    ("A", "Answer: B) A", 0),
    ("D", r"\boxed{D: none}", 1),
    ("A", r"\boxed{A:B}", 0),
    # units and what only looks like one
    ("18", "The answer is 18 dollars.", 1),
    ("18", r"\boxed{18 weeks}", 1),
    ("18", r"\boxed{18 people}", 1),
    ("18", r"\boxed{18 grams}", 1),
    ("18", r"\boxed{18\text{ cookies}}", 1),
    ("18 cookies", r"\boxed{18}", 1),
    ("18", r"\boxed{18 miles per hour}", 1),
    ("18", r"\boxed{18 km/h}", 1),
    ("18", r"\boxed{18\text{ m/s}^2}", 1),
    ("18", r"\boxed{18 cm^2}", 1),
    ("18", "\\boxed{18 m\u00b2}", 1),
    ("18", r"\boxed{18 square meters}", 1),
    ("18", r"\boxed{18~\text{kg}}", 1),
    ("18", r"\boxed{18 L}", 1),
    ("18", "\\boxed{18 \u20ac}", 1),
    ("3/4", r"\boxed{3/4 cup}", 1),
    ("1.5", r"\boxed{1 1/2 cups}", 1),
    ("1072", "The answer is 1,072 dollars.", 1),
    ("90", "The answer is 90\u00b0.", 1),
    ("90\u00b0", r"\boxed{90^\circ}", 1),
    ("90", r"\boxed{90\degree}", 1),
    ("5000000", r"\boxed{5 million}", 1),
    ("5000000", r"\boxed{5\text{ million dollars}}", 1),
    ("5", r"\boxed{5 million}", 0),
    ("5", r"\boxed{5\text{ million}}", 0),
    ("5", r"\boxed{5\text{ is wrong}}", 0),
    ("5", r"\boxed{5\text{ not}}", 0),
    ("5", r"\boxed{5\mod 7}", 0),
    ("5", r"\boxed{5 dozen}", 0),
    ("5", r"\boxed{5x}", 0),
    ("5", r"\boxed{5 x}", 0),
    (r"6.63\times10^{-34}", r"\boxed{6.63\times10^{-34}\text{ J s}}", 1),
    (r"6.63\times10^{-34}\text{ J}", r"\boxed{1.6\times10^{-19}}", 0),
    ("3000000000", r"\boxed{3 billion}", 1),
    ("2000000000000", r"\boxed{2 trillion}", 1),
    ("1.5", r"\boxed{1\frac{1}{2}\text{ cookies}}", 1),
    ("3/4", r"\boxed{\frac{3}{4}\text{ cookies}}", 1),
    ("5 or 6", r"\boxed{6 or 5}", 1),
    # percent
    ("12.5", r"\boxed{12.5\%}", 1),
    ("0.125", r"\boxed{12.5\%}", 1),
    (r"12.5\%", r"\boxed{12.5}", 1),
    (r"-5\%", r"\boxed{-5}", 1),
    (r"33\frac{1}{3}\%", r"\boxed{1/3}", 1),
    ("10", r"\boxed{10 percent}", 1),
    ("0.1", r"\boxed{10 percent}", 1),
    ("0.1", r"\boxed{10 per cent}", 1),
    (r"10\%", r"\boxed{20\%}", 0),
    (r"10\%", r"\boxed{0.1\%}", 0),
    # no arithmetic
    ("192.168.0.1", r"\boxed{192.168.0.2}", 0),
    ("192.168.0.1", r"\boxed{192.168.0.1}", 1),
    ("2024-01-05", r"\boxed{2024-05-01}", 0),
    ("2024-01-05", r"\boxed{2018}", 0),
    ("01/02/2024", r"\boxed{1/4048}", 0),
    ("555-1234", r"\boxed{-679}", 0),
    ("3-2", r"\boxed{1}", 0),
    ("12:30", r"\boxed{24:60}", 0),
    ("3:00", r"\boxed{3:0}", 0),
    ("3:30 pm", r"\boxed{3:30\text{ PM}}", 1),
    ("3:30 pm", r"\boxed{3:30 am}", 0),
    ("1 2 3", r"\boxed{6}", 0),
    ("6", r"\boxed{1 2 3}", 0),
    ("3 1 2", r"\boxed{1 2 3}", 0),
    ("1 2 3", r"\boxed{1 2 3.0}", 1),
    ("101_2", r"\boxed{101_3}", 0),
    ("101_2", r"\boxed{101_{2}}", 1),
    ("101_2", r"\boxed{101}", 1),
    ("no", r"\boxed{on}", 0),
    ("US", r"\boxed{SU}", 0),
    ("H2O", r"\boxed{O2H}", 0),
    ("H2O", r"\boxed{H_2O}", 0),
    ("R2D2", r"\boxed{D2R2}", 0),
    ("A1", r"\boxed{1A}", 0),
    ("3D4", r"\boxed{4D3}", 0),
    ("2x", r"\boxed{x \cdot 2}", 1),
    ("20", r"\boxed{10=20}", 0),
    ("7", r"\boxed{3+4=7}", 1),
    ("1, 1, 2", r"\boxed{1, 2}", 0),
    ("1, 2, 3", r"\boxed{3, 2, 1}", 1),
    (r"\{1,2\}", r"\boxed{(1,2)}", 0),
    ("(0,1)", r"\boxed{\{0,1\}}", 0),
    # small numbers, other writings
    ("10^{-7}", r"\boxed{0.0}", 0),
    ("1/10000000", r"\boxed{0.0000002}", 0),
    ("0.0000002", r"\boxed{1/10000000}", 0),
    ("1/3", r"\boxed{0.333333}", 1),
    ("2^{30}", r"\boxed{1073741825}", 0),
    ("1/3", r"\boxed{0.3333}", 0),
    ("1000", r"\boxed{1\,000}", 1),
    ("1000", r"\boxed{1 000}", 1),
    ("1000.5", r"\boxed{1 000.5}", 1),
    ("15", r"\boxed{1\,5}", 0),
    ("5", "\\boxed{5\u200b}", 1),
    (r"\infty", r"\boxed{infinity}", 1),
    (r"\emptyset", r"\boxed{\varnothing}", 1),
    ("5", r"\boxed{=5}", 1),
    ("1/2", "\\boxed{\u00bd}", 1),
    ("(1,2)", r"\boxed{\langle 1,2\rangle}", 1),
    (r"\pi", r"\boxed{pi}", 1),
]


def problem(answer: str | None) -> Problem:
    return Problem(question="?", answer=answer)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with closing(Grader(Rule(score=math_verify), workers=1)) as made:
        yield made


@pytest.mark.parametrize(("gold", "completion", "grade"), ROWS)
def test_math_verify(grader: Grader, gold: str, completion: str, grade: int) -> None:
    [graded] = grader.grade([(completion, problem(gold))])
    assert graded.error is None
    assert graded.grade == grade, graded


def test_the_arguments_of_math_verify_are_not_swapped() -> None:
    """math-verify is not symmetric: an interval as the right answer may be met by a relation, but not the other way round."""
    assert math_verify("1 < x < 2", problem("(1,2)")) == 0.0
    assert math_verify("(1,2)", problem("1 < x < 2")) == 1.0


@pytest.mark.parametrize(("answer", "right"), [("12", 1.0), (" 12\n", 1.0), ("12.0", 0.0)])
def test_exact(answer: str, right: float) -> None:
    assert exact(answer, problem("12")) == right
