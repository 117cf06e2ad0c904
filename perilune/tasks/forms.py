"""Wordings of whole-number questions: sums, differences, products, quotients, comparisons, conversions.

Imperatives end with a full stop, so that `wordings.phrase` may make them polite. Nothing here holds a form of `NEW_*`
in arithmetic.py (`wordings.phrase` sees to that for what it puts together).
"""

from typing import Final

from perilune.tasks.wordings import opposite

MORE_EXPRESSION: Final = (
    "What does {e} come to?", "What does {e} equal?", "{e} equals?", "{e}=?", "how much is {e}", "what's {e}?",
    "whats {e}", "what is {e}",
    "Determine {e}.", "Give me the result of {e}.", "Give me {e}.", "What is the result of {e}?",
    "What is the value of {e}?", "What do I get for {e}?",
    "Find the value of {e}.", "Compute this: {e}.", "Calculate this for me: {e}.", "Work this out: {e}.",
    "Solve this: {e}.", "Result of {e}?",
    "The expression is {e}. What is its value?", "Here is an expression: {e}. Work it out.", "Expression: {e}",
    "Value of {e}?", "Let me know what {e} is.",
    "tell me what {e} is.", "If I type {e} into a calculator, what comes out?", "What would {e} be?",
    "How much does {e} make?", "{e}, how much is it?",
    "I get stuck at {e}. What is it?", "Use the order of operations: {e}", "Mind the brackets: {e}", "{e} is what?",
    "Do this sum: {e}.", "Answer: {e} =",
    "calc {e}", "What is the answer to {e}?", "Evaluate the expression {e}.",
    "The teacher wrote {e}. What is the answer?", "x = {e}. What is x?",
)  # fmt: skip
MORE_ADD: Final = (
    "{a} and {b} together?", "What do {a} and {b} come to?", "What is the total of {a} and {b}?",
    "Total of {a} and {b}.", "{a} added to {b}", "What is {a} added to {b}?", "If I add {b} to {a}, what do I get?",
    "Increase {a} by {b}.", "What is {b} more than {a}?", "{b} more than {a} is what?",
    "What number is {b} more than {a}?", "Put {a} and {b} together.", "Sum up {a} and {b}.", "Sum {a} and {b}.",
    "Add up {a} and {b}.", "Add these two numbers: {a}, {b}.", "Add the following: {a} and {b}.", "Add {b} onto {a}.",
    "Plus: {a}, {b}", "How much would {a} and {b} be in total?", "How many is {a} and {b}?",
    "What is the result of adding {a} and {b}?", "Give me the total when {a} is added to {b}.",
    "Work out the sum of {a} and {b}.", "Compute the sum of {a} and {b}.", "Calculate the sum of {a} and {b}.",
    "Tell me the sum of {a} and {b}.", "Two numbers are {a} and {b}. What is their sum?",
    "Here are two numbers, {a} and {b}. Add them up.", "Numbers: {a}, {b}. Sum?", "{a}\n+{b}\n----",
    "  {a}\n+ {b}\n=====", "{a} +{b}", "What comes out when I add {a} and {b}?", "What's the sum of {a} and {b}?",
    "What's {a} and {b} together?", "The first number is {a}. The second one is {b}. What is the sum?",
    "Start at {a} and go up by {b}. Where are you?", "Count on {b} from {a}.", "From {a}, go {b} up.",
    "Raise {a} by {b}.", "If you have {a} and add {b}, what is the result?",
    "How much is it if I put {b} on top of {a}?", "What do I get when I add {a} to {b}?",
    "Combine {a} and {b} into one sum.", "add {a} {b}", "{a} & {b}, what's the total?", "add together {a} and {b}",
    "{a} and {b} makes how much?",
    *[form.replace("{e}", e) for form in MORE_EXPRESSION for e in ("{a} + {b}", "{a} plus {b}")],
)  # fmt: skip
MORE_SUBTRACT: Final = (
    "{a} take away {b}", "What is {a} take away {b}?", "{a} less {b}", "What is {a} less {b}?",
    "What is {b} less than {a}?", "{b} less than {a} is what?", "What number is {b} less than {a}?",
    "Decrease {a} by {b}.", "Reduce {a} by {b}.", "Lower {a} by {b}.", "Take {b} off {a}.", "Take {b} from {a}.",
    "Remove {b} from {a}.", "Deduct {b} from {a}.", "Subtract {b} off {a}.", "Minus: {a}, {b}",
    "How much bigger is {a} than {b}?", "How much more is {a} than {b}?", "By how much is {a} larger than {b}?",
    "How much larger is {a} than {b}?", "How far apart are {a} and {b}?", "What is the gap between {a} and {b}?",
    "What is the difference between {a} and {b}?", "Difference between {a} and {b}?", "difference of {a} and {b}",
    "Tell me the difference between {a} and {b}.", "What must I add to {b} to get {a}?",
    "What do you have to add to {b} to reach {a}?", "How much is missing from {b} to {a}?",
    "How many more than {b} is {a}?", "If I take {b} from {a}, what is left?", "What remains if you take {b} from {a}?",
    "What is left when {b} is taken from {a}?", "What's left of {a} after removing {b}?",
    "What is {a} with {b} taken off?", "What do I get when I subtract {b} from {a}?",
    "If I subtract {b} from {a}, what do I get?", "{a} -{b}", "{a}\n-{b}\n----", "  {a}\n- {b}\n=====",
    "Calculate the difference of {a} and {b}.", "Start at {a} and go down by {b}. Where are you?",
    "Count back {b} from {a}.", "From {a}, go {b} down.",
    "The first number is {a}, the second {b}. What is the first minus the second?",
    "Two numbers: {a} and {b}. What is the difference?", "What is the result of subtracting {b} from {a}?",
    "What comes out when I take {b} off {a}?", "If you have {a} and take off {b}, what is the result?",
    "What is {a} reduced by {b}?", "What is {a} decreased by {b}?", "subtract {b} from {a}",
    "take {b} away from {a}, what's left", "{a} without {b}?", "How much is {a} without {b}?",
    *[form.replace("{e}", e) for form in MORE_EXPRESSION for e in ("{a} - {b}", "{a} minus {b}")],
)  # fmt: skip
MORE_TIMES: Final = (
    "{a} multiplied by {k}", "What is {a} multiplied by {k}?", "{a} times {k} is?", "{k} times {a}?",
    "How much is {k} times {a}?", "What do {k} lots of {a} make?", "{k} groups of {a}, how many is that?",
    "Work out {a} times {k}.", "whats {a} times {k}", "product of {a} and {k}", "Give me the product of {a} and {k}.",
    "Calculate {a} times {k}.", "Calculate the product of {a} and {k}.", "One costs {a} coins. What do {k} cost?",
    "{k} boxes with {a} each, how many in total?", "What is {a} taken {k} times?",
    "If one bag holds {a}, how many do {k} bags hold?", "What do I get when I multiply {a} by {k}?",
    "multiply {a} and {k}", "Multiply {a} with {k}.", "How many is {k} packs of {a}?",
    "What is the result of {a} times {k}?", "{a} a day for {k} days, how much is it?",
    "Each of {k} people gets {a}. How many are needed?",
)  # fmt: skip
DOUBLE: Final = (
    ("What is twice {a}?", "Double {a}.", "What is the double of {a}?", "{a} doubled", "What is two times {a}?",
        "two times {a}", "How much is twice {a}?"),
    ("What is three times {a}?", "Triple {a}.", "What is {a} tripled?", "three times {a}",
        "How much is three times {a}?", "treble {a}"),
)  # fmt: skip
DIVIDE_FORMS: Final = (
    "What is {a} divided by {k}?", "{a} / {k}", "{a}/{k}", "{a} : {k}", "{a} ÷ {k}", "Divide {a} by {k}.",
    "{a} divided by {k}", "How much is {a} divided by {k}?",
    "Compute {a} / {k}.", "What is {a} / {k}?", "How many times does {k} go into {a}?",
    "Split {a} into {k} equal parts. How big is one?", "Share {a} among {k} people.",
    "{a} sweets are shared by {k} children. How many does each get?", "What is the quotient of {a} and {k}?",
    "whats {a} divided by {k}", "{a} over {k}?",
    "How many groups of {k} are in {a}?", "{a} is packed in boxes of {k}. How many boxes?",
    "{k} tickets cost {a} euros. What does one cost?", "Calculate {a} / {k}.",
    "If {a} is split evenly between {k}, how much does each get?", "What is one {k}th of {a}?", "{a} / {k} = ?",
    "what's {a}/{k}",
)  # fmt: skip
HALF_FORMS: Final = (
    "What is half of {a}?", "Halve {a}.", "half of {a}", "How much is half of {a}?", "What is {a} halved?",
    "What's half of {a}?",
)  # fmt: skip
MORE_LARGER: Final = (
    "What is bigger, {a} or {b}?", "what's more, {a} or {b}?", "Which is more, {a} or {b}?",
    "Which number is greater: {a} or {b}?", "{a} or {b}, which is larger?",
    "{a} or {b} - which one is bigger?", "Who has more, the one with {a} or the one with {b}?",
    "Compare {a} and {b} and give the larger one.", "Pick the larger: {a}, {b}.",
    "Name the bigger number: {a} or {b}.", "Which of these is the greatest: {a}, {b}?",
    "Between {a} and {b}, which one is higher?", "Which is the higher number, {a} or {b}?",
    "max of {a} and {b}", "What is the maximum of {a} and {b}?", "larger of {a} and {b}?",
    "Give me the larger of {a} and {b}.", "whats bigger {a} or {b}",
    "Is {a} more or is {b} more?", "One shop asks {a}, the other {b}. Which price is higher?",
    "Team one has {a} points, team two {b}. What is the higher score?",
    "max({a}, {b})", "Out of {a} and {b}, pick the bigger one.",
    "I have two offers, {a} and {b}. Which is the higher one?", "Choose the greater number: {a} or {b}.",
)  # fmt: skip
MORE_SMALLER: Final = tuple(map(opposite, MORE_LARGER))
LARGEST_FORMS: Final = (
    "Which is the largest: {x}?", "What is the largest of {x}?", "Which of {x} is the biggest?",
    "Find the largest number: {x}.", "What is the maximum of {x}?", "biggest of {x}?",
    "Which number is the greatest, {x}?", "Give me the highest of {x}.", "Out of {x}, which is the largest?",
    "Pick the biggest one: {x}.", "The scores are {x}. Which is the highest?",
)  # fmt: skip
SMALLEST_FORMS: Final = tuple(map(opposite, LARGEST_FORMS))
MORE_UNIT: Final = (
    "How many {small} is {n} {large}?", "how many {small} in {n} {large}", "{n} {large} to {small}",
    "{n} {large} = ? {small}", "Convert {n} {large} into {small}.", "What are {n} {large} in {small}?",
    "Change {n} {large} to {small}.", "How many {small} do {n} {large} have?", "How many {small} make {n} {large}?",
    "{n} {large} is how many {small}?", "I have {n} {large}. How many {small} is that?",
    "It takes {n} {large}. How many {small} is that?", "Give me {n} {large} in {small}.", "{n} {large} -> {small}",
    "What is the number of {small} in {n} {large}?", "How much is {n} {large} in {small}?",
)  # fmt: skip
OPERATOR_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "+": (" plus ", " plus ", " and "), "-": (" minus ", " minus ", " take away ", " less "),
    "*": (" times ", " times ", " multiplied by ", " x "), "/": (" divided by ",),
}  # fmt: skip
SUM_OF_FORMS: Final = (
    "What is the sum of {x}?", "Add {x}.", "Add up {x}.", "What is the total of {x}?",
    "What do {x} add up to?", "Total: {x}",
    "How much are {x} together?", "Numbers: {x}. Give me the sum.",
    "What do I get if I add {x}?",
)  # fmt: skip
