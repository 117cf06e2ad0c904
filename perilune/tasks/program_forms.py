"""More wordings of small programs, by kind; programs.py has those that structural problems may show besides."""

from typing import Final

from perilune.tasks.wordings import lined, opposite

MORE: Final = lined("""
reverse: Reverse {w}.|reverse "{w}"|Flip the word {w} around.|Turn {w} around, last letter first.|What do you get if \
you read {w} from right to left?|Read {w} backwards.|Type {w} in reverse order.|Mirror the word {w}.|What is {w} in \
reverse?|"{w}"[::-1]|print("{w}"[::-1])|Spell {w} backwards.|{w} backwards?|How is {w} written from back to front?|\
Reverse the letters of {w}.|Write the letters of the word {w} in the opposite order.|reversed: {w}|\
{w}, but back to front
alternate: Keep only the first, third, fifth ... letter of {w}.|Every other letter of {w}, starting with the first.|\
Take letters 1, 3, 5 and so on of {w}.|"{w}"[::2]|Skip every second letter of {w}.
upper: Uppercase {w}.|Capitalise every letter of {w}.|{w} in capital letters?|Convert {w} to upper case.|"{w}".upper()|\
Shout the word {w}.|Write {w} in all caps.|Turn {w} into capital letters.|all caps: {w}|Make every letter of {w} big.|\
{w} in capitals only
length: How many letters are in {w}?|Letters in {w}?|What is the length of {w}?|length of "{w}"|len("{w}")|\
print(len("{w}"))|How many characters does {w} have?|Count the characters in {w}.|Number of letters in the word {w}?|\
how long is {w}|{w}: number of letters?
count: How many times does the letter {c} appear in {w}?|How many {c} are in {w}?|How many of the letters of {w} are \
{c}?|Number of {c} in {w}?|Count every {c} in the word {w}.|"{w}".count("{c}")|How often do you see {c} in {w}?|In \
{w}, how many times is there a {c}?|count {c} in {w}|How many letters {c} does the word {w} have?|{w}: how many {c}?
vowels: How many vowels are in {w}?|Number of vowels in {w}?|Count the vowels in {w}.|Vowels in {w}?|How many of a, e, \
i, o, u does {w} have?|How many letters of {w} are vowels?|vowel count for {w}?
initials: Give the initials of {w}.|What are the first letters of the words {w}?|Take the initial of every word: {w}|\
First letters: {w}|Make an acronym of {w}.|Build a word from the first letters of "{w}".|What do the first letters of \
"{w}" spell?|acronym of {w}
sort: Sort these numbers: {x}|Sort {x} from small to large.|Put these in order: {x}|Order the numbers {x} from \
smallest to largest.|Arrange {x} in increasing order.|sorted({x})|print(sorted({x}))|Sort ascending: {x}|Can you sort \
{x}?|From lowest to highest: {x}|What does {x} look like sorted?|Rank {x} from the smallest up.|\
{x}: smallest first, please|ascending: {x}
sort down: Sort {x} from large to small.|Order {x} from largest to smallest.|Arrange {x} in decreasing order.|\
sorted({x}, reverse=True)|Sort descending: {x}|Put {x} in order, biggest first.|From highest to lowest: {x}|Sort {x} \
in reverse order.|{x}: largest first, please|descending: {x}
max: What's the biggest number in {x}?|max({x})|Largest of {x}?|Find the largest number in {x}.|Which is the highest \
number in {x}?|Give me the maximum of {x}.|biggest: {x}|What is the highest value in {x}?|print(max({x}))|\
{x}: the top one?
reverse list: Reverse this list: {x}|{x}[::-1]|Put {x} in the opposite order.|List {x} from back to front.|What is {x} \
in reverse?|Flip the list {x}.|list(reversed({x}))|Last to first: {x}
second: Every other item of {x}, starting with the first.|{x}[::2]|Take items 1, 3, 5 of {x}.|Skip every second item \
of {x}.|Keep the first, third, fifth item of {x}.
nth: What is the {o} item of {x}?|Which is the {o} number in {x}?|Give me the {o} element of {x}.|{o} number of {x}?|\
In the list {x}, what is at position {n}?|Item {n} of {x}?|Tell me the {o} entry in {x}.
size: How many numbers are in {x}?|len({x})|How many elements does {x} have?|Length of {x}?|Count the elements of {x}.|\
How many entries has {x}?|How many numbers do you see: {x}|print(len({x}))
above: How many numbers of {x} are bigger than {k}?|How many are above {k}: {x}|Count the numbers greater than {k} in \
{x}.|How many of these are over {k}? {x}|In {x}, how many exceed {k}?|How many values in {x} are more than {k}?|sum(n \
> {k} for n in {x})|{x}: how many beat {k}?
unique: Remove duplicates: {x}|Take out the duplicates in {x}.|Without repeats, what is {x}?|Keep each number of {x} \
once.|Deduplicate {x}.|Which distinct numbers are in {x}, in order?|Drop the doubles from {x}.|unique values of {x}|\
{x} with no number twice
after: What is the date {n} days after {d}?|{d} + {n} days|Today is {d}. What date is it in {n} days?|Which day comes \
{n} days after {d}?|I ordered on {d} and it takes {n} days. On which date does it come?|What date do I get if I add \
{n} days to {d}?|{n} days from {d}?|A course starts on {d}, the exam is {n} days later. When is the exam?|The date is \
{d}. {n} days later?|{n} days past {d}?
between: How many days from {d} until {e}?|How many days lie between {d} and {e}?|Days between {d} and {e}?|From {d} \
to {e}, how many days?|My holiday is from {d} to {e}. How many days until it ends?|How many days after {d} is {e}?|It \
is {d}. How many days are left until {e}?|Number of days from {d} to {e}|{d} to {e} in days?
weekday: Today is {w}. What day is it in {n} days?|If today is {w}, which day of the week is it in {n} days?|{n} days \
after a {w}?|It's {w}. What weekday will it be {n} days from now?|{w} plus {n} days is which day?|What day of the week \
comes {n} days after {w}?|We meet {n} days after {w}. Which weekday is that?|Which weekday is it {n} days after {w}?|\
today is {w}, {n} days later is a...|{w}, and {n} days go by. Now it is?
sum list: What is the sum of {x}?|sum({x})|Add up the numbers in {x}.|Total of {x}?|Sum up the list {x}.|\
print(sum({x}))|What do the numbers {x} add up to?|Add all items of {x}.|sum of the list {x}|{x}: the total?
evens: Which numbers in {x} are even?|Keep only the even numbers of {x}.|[n for n in {x} if n % 2 == 0]|Filter the \
even numbers from {x}.|List the even numbers in {x}.|Even numbers of {x}?|Remove the odd numbers from {x}.|\
{x}: evens only
odds: Which numbers in {x} are odd?|Keep only the odd numbers of {x}.|[n for n in {x} if n % 2 == 1]|Filter the odd \
numbers from {x}.|List the odd numbers in {x}.|Odd numbers of {x}?|Remove the even numbers from {x}.|{x}: odds only
count evens: How many numbers in {x} are even?|How many even numbers are in {x}?|Count the even numbers in {x}.|How \
many of {x} can be divided by two?
head: What are the first {n} items of {x}?|{x}[:{n}]|Take the first {n} numbers of {x}.|Give me the first {n} of {x}.|\
Keep only the first {n} elements of {x}.
tail: What are the last {n} items of {x}?|{x}[-{n}:]|Take the last {n} numbers of {x}.|Give me the last {n} of {x}.|\
Keep only the last {n} elements of {x}.
last: What is the last item of {x}?|{x}[-1]|Which number comes last in {x}?|Last element of {x}?|Give the final number \
of {x}.|What number does {x} end with?
first: What is the first item of {x}?|{x}[0]|Which number comes first in {x}?|First element of {x}?|What number does \
{x} begin with?
append: Append {k} to {x}.|{x} + [{k}]|Put {k} at the end of {x}.|Add the item {k} at the end of the list {x}.|What is \
{x} with {k} appended?
drop: Remove {k} from {x}.|Delete the number {k} from the list {x}.|Take {k} out of {x}.|What is left of {x} without \
{k}?
place: At which position is {k} in {x}, counting from 1?|Where is {k} in {x}? Count from 1.|Which item of {x} is {k}?|\
What place does {k} have in {x}, starting at 1?
times list: How often is {k} in {x}?|{x}.count({k})|How many times does {k} occur in {x}?|Count how often {k} appears \
in {x}.|How many {k}s are in {x}?
lower: Write {W} in lower case.|"{W}".lower()|Lowercase {W}.|Make {W} lower case.|Turn {W} into small letters.|{W} in \
small letters?|{W}, but small letters
repeat: Repeat {w} {n} times.|"{w}" * {n}|Write {w} {n} times in a row without spaces.|print("{w}" * {n})
glue: Join {w} and {v}.|"{w}" + "{v}"|Put {w} and {v} together as one word.|Concatenate {w} and {v}.|What do you get \
if you write {v} right after {w}?|Stick {w} and {v} together.
weekday back: Today is {w}. Which weekday was it {n} days ago?|What day was it {n} days before {w}?|{n} days before a \
{w}?|If it is {w}, what day was it {n} days earlier?|It's {w}. What day of the week was {n} days ago?|\
{w} now. {n} days ago?
before: What is the date {n} days before {d}?|{d} - {n} days|Today is {d}. What date was it {n} days ago?|Which date \
is {n} days earlier than {d}?|Go back {n} days from {d}.|{d}, and {n} days back: which date?
month: How many days does {m} have?|How many days are in {m}?|Number of days in {m}?|How long is the month of {m} in \
days?|days in {m}|{m}: how many days?
later: Which date is later, {d} or {e}?|Which comes later: {d} or {e}?|What is the later date, {d} or {e}?|{d} or {e}: \
which one is later?
earlier: Which date is earlier, {d} or {e}?|Which comes first: {d} or {e}?|What is the earlier date, {d} or {e}?|{d} \
or {e}: which one is earlier?
next day: What day comes after {w}?|Which weekday follows {w}?|What is the day after {w}?|What comes right after {w}?
next month: Which month comes after {m}?|What month follows {m}?|What is the month after {m}?
double: Double every number in {x}.|[2 * n for n in {x}]|Multiply each item of {x} by 2.|What is {x} with every number \
doubled?|Twice each of {x}?
plus: Add {k} to every number in {x}.|[n + {k} for n in {x}]|Increase each item of {x} by {k}.|What is {x} with {k} \
added to each?
first letter: What is the first letter of {w}?|With which letter does {w} begin?|First letter of {w}?|"{w}"[0]|What \
letter does {w} start with?
last letter: What is the last letter of {w}?|With which letter does {w} end?|Last letter of {w}?|"{w}"[-1]|What letter \
does {w} end with?
nth letter: What is the {o} letter of {w}?|Which letter of {w} is at place {n}?|Letter number {n} of {w}?|{o} letter \
of {w}?|Give me the {o} character of {w}.|In {w}, which letter stands at position {n}?
drop vowels: Remove the vowels from {w}.|Write {w} without vowels.|{w} without a, e, i, o, u?|Delete all vowels in \
{w}.|Take the vowels out of {w}.|Only the consonants of {w}, please.
drop letter: Remove every {c} from {w}.|Write {w} without the letter {c}.|Delete the letter {c} in {w}.|\
"{w}".replace("{c}", "")|Take out each {c} of {w}.|{w} without {c}?|{w} with no {c}
swap letter: Replace {c} with {e} in {w}.|"{w}".replace("{c}", "{e}")|Change every {c} of {w} to {e}.|Write {w} with \
{e} instead of {c}.|In {w}, put {e} for each {c}.|What is {w} if you replace {c} by {e}?|{w}, each {c} made {e}
capital: Capitalise {w}.|Write {w} with a capital first letter.|"{w}".capitalize()|Give {w} a capital letter at the \
start.|Make the first letter of {w} upper case.
hyphen: Join the words {t} with hyphens.|"-".join({l})|Write {t} with hyphens instead of spaces.|Put a hyphen between \
the words: {t}|Connect {t} with hyphens.|"{t}".replace(" ", "-")
words: How many words are in "{t}"?|Count the words: {t}|How many words does "{t}" have?|len("{t}".split())|Number of \
words in "{t}"?|{t}: how many words?
last word: What is the last word of "{t}"?|Which word comes last: {t}|Give me the last word of: {t}
reverse words: Reverse the order of the words: {t}|Write the words of "{t}" in the opposite order.|" \
".join(reversed("{t}".split()))|Put the words {t} from last to first.
longest: Which is the longest word: {t}?|What is the longest of these words? {t}|Find the longest word in "{t}".|\
max({l}, key=len)|longest word of {t}|{t}: the longest?
alphabet: Sort the words {t} alphabetically.|Put {t} in alphabetical order.|sorted({l})|Order these words from a to z: \
{t}|Alphabetical order, please: {t}|{t}: a to z, please
palindrome: Is {w} a palindrome?|Does {w} read the same backwards?|"{w}" == "{w}"[::-1]? Answer yes or no.|Is the word \
{w} the same from both sides?|{w}: palindrome, yes or no?
has letter: Does {w} contain the letter {c}?|Is there a {c} in {w}?|"{c}" in "{w}"? Answer yes or no.|Is the letter \
{c} part of {w}?|{c} in {w}: yes or no?
""")
MORE["min"] = tuple(map(opposite, MORE["max"]))
# What begins on a date, and what happens some days later or before.
for _kind, _ends in (
    (
        "after",
        " and {n} days later it is over| and takes effect {n} days later|. {n} days after that I \
call|; {n} days later comes the letter",
    ),
    (
        "before",
        "; {n} days earlier I have to be ready|. I order {n} days before \
that|, and {n} days before that comes the notice",
    ),
):
    MORE[_kind] += tuple(
        [
            f"{begin} {{d}}{end}. {ask}"
            for begin in (
                "A parcel is posted on",
                "The fair opens on",
                "We plant beans on",
                "My visa is dated",
                "The contract is signed on",
            )
            for end in _ends.split("|")
            for ask in (
                "On which date?",
                "Which date is that?",
                "Give that date as YYYY-MM-DD.",
                "date?",
                "When is that?",
            )
        ]
    )
