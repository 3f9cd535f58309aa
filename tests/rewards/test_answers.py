"""What answers are worth to reward.py: tables of answers, each right or wrong by mathematics or by its words."""

import json
from fractions import Fraction
from itertools import chain

import pytest
from conftest import GSM8K, needs_gsm8k
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.rewards.answers import math_process
from reward import correctness_reward, last_number_reward

# Below, a line is a gold and answers, with " | " between them.
EQUAL = {
    "numbers with words, mixed numbers": r"""
        \frac{5}{2} | 2 1/2 | 2 1/2 cups | 2.5 | 2.50 dollars | 5/2 | $2.50 | 2 \frac{1}{2} | x = 2 1/2
        2 1/2 | \frac{5}{2} | \frac52 | \dfrac{10}{4} | 2.5 | 2\frac12 | $\frac{5}{2}$
        2 1/4 | \frac94 | 2\frac{1}{4}
        \frac{5}{4} | 1 1/4 | 1.25 m | 1.25 | 1 1/4 hours
        -\frac{3}{2} | -1 1/2 | -1.5 | - 1 1/2 | \frac{-3}{2}
        \frac{7}{3}\text{ hours} | 2 1/3 | 2 1/3 hours | 2 1/3 hrs | \frac{7}{3}
        2 1/2 cups | \frac52 | 2.5 | \frac{5}{2}\text{ cups}
        2 \times 10^{-20} | \frac{2}{10^{20}} | \frac{1}{5 \cdot 10^{19}} | 2e-20
        \sqrt{2} \cdot 10^{-20} | \frac{2}{\sqrt{2} \cdot 10^{20}}
        \sqrt{5+2\sqrt{6}} | \sqrt{2}+\sqrt{3}
        (2-\sqrt{3})^{50} | \frac{1}{(2+\sqrt{3})^{50}}
        e^{-50} | \frac{1}{e^{50}}
        10^{-20}x + 1 | 1 + \frac{x}{10^{20}}
        \ln 6 | \ln 2 + \ln 3
        0.125 | \frac18 | 1/8 of the cake
        \frac{36}{2} | 18 apples | $18 | 18.0 | 18个
        3\frac{1}{2} | 3 1/2 | 3½ | 7/2 cups | 3.5
        1000 | 10^3 | 1,000 km
        10^{6} | 1,000,000 | 1e6 | 1,000,000 people
        (\frac{5}{2}, 3) | (2 1/2, 3) | (2.5, 3)
        \frac{1}{2} | 50\% | 50%
    """,
    "units": r"""
        5 minutes | 5 | 5 min | 5 mins | 5 minute | 5.0 minutes | 5\text{ minutes} | 5 Minutes | \frac{10}{2}
        2 hours | 2 h | 2 hr | 2 hrs | 2\text{ hr} | 2 hours of work | 2
        5\text{ cm} | 5 cm | 5 centimeters | 5 centimetres | 5\,\mathrm{cm} | 5 | 5~\text{cm} | x = 5\text{ cm}
        5\text{ cm}^2 | 5 cm^2 | 5 cm² | 5 square centimeters | 5 square cm | 5 sq cm | 5\text{ square centimetres} | 5
        8\text{ m}^3 | 8 cubic meters | 8 m³ | 8 meters cubed | 8\text{ m}^{3} | 8
        10\text{ dollars} | \$10 | $10.00 | 10 dollars | 10 USD | 10 bucks | 10 dollar
        \$18 | 18 dollars | 18 apples | 18 | 18\text{ dollars} | $18 profit
        10 cents | 10 cent | 10 | 10\text{ cents} | 10¢ | 10 ¢
        60 degrees | 60° | 60^\circ | 60^{\circ} | 60 | 60\text{ degrees}
        60^\circ | 60 degrees | 60
        25 °C | 25 degrees Celsius | 25 degrees | 25°C | 25 Celsius | 25^\circ C
        60 mph | 60 miles per hour | 60 | 60 miles/hour | 60 miles an hour
        60 km/h | 60 kilometers per hour | 60 kilometres per hour | 60 kph
        5 apples | 5 red apples | 5 | 5 apples left | 5 apple
        12 chocolate cookies | 12 cookies | 12 | 12 cookies left over
        3 children | 3 | 3 small children
        12 dollars per person | 12 dollars | $12
        5 kg | 5 kilograms | 5 kg of apples | 5
        6 feet | 6 ft | 6 foot
        7 in | 7 inches | 7 inch
        9\pi\text{ cm}^2 | 9\pi | 9\pi cm^2 | 9π square centimeters | 9\pi\text{ square cm}
        50 percent | 50% | 50 | 50\%
        5 m | 5 metres | 5\text{ m}
        3\text{ cm}, 4\text{ cm} | 3, 4 | 3, 4 cm | 3\text{ cm}, 4\text{ cm}
        18 \text{ years} | 18 years old | 18
        20 miles in total | 20 miles | 20 miles in all
        3/4 cup | 0.75 cups | \frac34 | \frac{3}{4}\text{ cup}
    """,
    "Unicode": r"""
        10-2\sqrt{5} | 10 - 2√5 | 10 − 2√5 | 10−2√(5) | 10 - 2 \sqrt 5
        \sqrt{12} | √12 | 2√3 | √(12) | √ 12
        \sqrt{2+\sqrt{3}} | √(2+√3)
        \sqrt[3]{2} | ∛2 | ∛ 2
        \frac{1+\sqrt{5}}{2} | (1+√5)/2 | (1 + √5) ÷ 2
        \frac{\sqrt{2}}{2} | √2/2 | 1/√2
        [0, \infty) | [0, ∞) | [０，∞）
        x^2 | x² | x^{2}
        x^{10}+1 | x¹⁰+1 | 1 + x¹⁰
        10^{-3} | 10⁻³ | 0.001
        \frac{1}{2} | ½ | 1/2 | ½ cup
        \frac{3}{4} | ¾ | 0.75
        2.5 | 2½ | 2 ½ | 5/2
        \frac{1}{3} | ⅓
        \frac{2}{3} | ⅔ | 4/6
        \frac{7}{8} | ⅞
        -\frac{5}{4} | −1¼ | -1¼
        \frac{1}{2}x | ½x
        \frac{\pi}{2} | ½π | π/2 | π ÷ 2
        \frac{5\pi}{2} | 2½π
        60^\circ | 60° | 60 ° | 60º
        \infty | ∞ | +∞ | \infty.
        -\infty | −∞ | -∞
        (-\infty, 3] | (−∞, 3]
        6 | 2×3 | 2 × 3 | 12÷2 | 2·3 | ６ | 2 ⋅ 3 | 2∗3
        -6 | 2×(−3) | －６ | –6 | −6.0
        1.6 \times 10^{-19} | 1.6×10⁻¹⁹ | 1.6·10⁻¹⁹
        2\pi | 2π | 2 π
        3 \pm \sqrt{2} | 3 ± √2 | 3±√2
        x \leq 5 | x ≤ 5 | x≤5
        x \geq -2 | x ≥ −2
        x \neq 3 | x ≠ 3
        x > 3 | x ＞ 3
        (1,2) | （1，2） | (1, 2)
        \{1,2\} | \{1、2\}
        12 | １２ | 12个 | 12 个 | 12元 | 12個 | 12人 | 12个苹果 | 12小时 | 12公里 | 12千米 | 12。 | 12岁 | 12つ
        12个 | 12 | 12个
        5 小时 | 5 | 5小时 | ５小时
        3 | 3件 | 3支 | 3平方米 | 3平方厘米 | 3毫升 | 3美元 | 3分钟 | 3本书 | 3次
        1.5 | １．５ | 1½
        \frac{\theta}{2} | θ/2
        x^2+2x+1 | x²+2x+1 | (x+1)²
        20 | 20 ㎏ | 20℃
    """,
    "choices and words": r"""
        B | B. | b | b. | B) | B) 12 | B. 12 | B: 12 | (B) 12 | (B). | (B) | b) 12 | **B** | **B.** 12 | \text{B.} | $B$
        A | A) A cat | A. a cat | a | \textbf{(A)}\ 12 | \textbf{(A) } 12 | \boxed{A} | (A) $\frac{1}{2}$
        J | j | J.
        c | c. | c) 5 | (c)
        \text{(B)} | B | b | B) 7
        B, D | B,D | B,D. | B and D | (B), (D) | B , D | b, d
        A,C,D | A, C, D | A, C, and D | A, C and D
        red, blue | red,blue | Red, blue | red and blue
        even | Even | EVEN | even. | Even. | \text{Even}
        odd | Odd
        True | true | TRUE | True. | \text{true}
        False | false
        Yes | yes | YES | yes.
        No | no
        no solution | No solution | No Solution
        No solution | no solution
        Monday | Monday.
        east | East
        x | x.
        5 | 5.
    """,
    "boxes": r"""
        5 | The answer is \boxed{5}. | \boxed 5 | \fbox{5} | So we get $\boxed{5}$ | Final answer: \boxed{5}
        5 | Therefore, the maximum value is \boxed{5}. | \boxed{5} apples
        5 | So x = \boxed{5}. | $x = \boxed{5}$ | I get \(\boxed{5}\). | \boxed5
        5 | The sum of the two numbers is \[\boxed{5}\]
        5 | **Answer:** \boxed{5} | The answer is \fbox{$5$} | \boxed{\boxed{5}}
        \frac{1}{2} | The answer is \boxed{\frac{1}{2}}. | \boxed \frac{1}{2}
        \frac{1}{2} | \boxed{0.5} | The answer is \boxed{½}
        5 cm | The length is \boxed{5} cm. | The length is \boxed{5}. | The length is \boxed{5 cm}
        B | The answer is \boxed{B}. | \boxed{\text{B}}
    """,
    "values of several letters, lists, unions": r"""
        (1,2) | x=1, y=2 | y=2, x=1 | y = 2, x = 1 | y = 2,\ x = 1
        \frac{3}{4} cups | \frac{3}{4} | \frac{6}{8} cup
        \frac{3}{4} | \frac{3}{4} cups
        10 | \binom{5}{2} ways
        2^5 subsets | 32
        x=2, y=3 | 2, 3 | (2,3)
        x=2, x=3 | 3, 2
        100, 200 | 100,200
        \{101, 202\} | 101,202
        (-\infty,-1]\cup(2,\infty) | (2,\infty)\cup(-\infty,-1]
        x>1 and x<5 | x>1 and x<5
    """,
    "fractions of one sign, degrees, bases": r"""
        \sqrt{\frac12} | √½
        6 | 3/½
        12 | 6÷½
        \sqrt{x} | x^½
        \cos 20^\circ | \cos(20^\circ) | \sin 70^\circ
        2\cos 40^\circ | 2\cos(40^\circ)
        \frac12 | \sin 30^\circ
        1 | \tan 45^\circ
        1011_2 | 1011_{2}
        9\pi cm^2 | 9\pi
        \frac{1}{8} | 12.5% | 12.5\%
        \frac{1}{40} | 2.5\%
    """,
    "a name before, a choice with what it stands for": r"""
        25 | $m+n = 25$ | m+n = 25 | \(m+n = 25\)
        5 | AB = 5 | f(2) = 5 | x_1 = 5 | $x_{12} = 5$
        B) 12 | B | b | (B)
        (B) 12 | B
        \textbf{(B)}\ 12 | B
        \sqrt{\frac{1+\sqrt5}{2}} | √((1+√5)/2)
    """,
    "products by brackets, other letters, differences of letters": r"""
        20 | \(4(5) = 20\) | 4(5) = 20 | $4(5)$ | 4(5) | \(4\left(5\right)\)
        18 | \(12(1.5) = 18\) | 20\left(\frac{9}{10}\right) | \(2(3)(3) = 18\) | $12(1.5) = 18$
        4 | 10-2(3) = 4 | \(10-2(3)\)
        \frac34 | 1-4\left(\frac1{16}\right)
        \frac32 | (3)\frac12
        x^2+6 | x^2+2(3)
        3R^2 | R^2 \cdot 3
        \frac43\pi R^3 | V = \frac43\pi R^3
        \log_2(3) | \frac{\ln 3}{\ln 2}
        p - q | p-q | $p-q$ | -q+p
        -x | - x | $-x$
    """,
    "behind an answer": r"""
        \frac12 | \frac{1}{2}. | $\frac{1}{2}$. | x = \frac{1}{2}. | $\frac{1}{2}$ cm
        18 | \(18\). | $x = 18$. | **18**. | \(18\) dollars | **18** dollars | $18$ apples. | 18 dollars.
        (1,2) | (1, 2). | $(1,2)$.
        B | $B$. | \(B\). | B. I only | B) 0.05 J | B. Vitamin D deficiency | B. It does not change. | B) neither
        even | \text{Even}.
        2x+1 | $2x+1$. | 1+2x.
    """,
    "names of several signs": r"""
        5 | AB^2 = 5 | $AB^2 = 5$ | f(-1) = 5 | |z| = 5 | a/b = 5 | m^2+n^2 = 5 | f(f(2)) = 5 | 10a+b = 5 | abc = 5
    """,
    "other commands of LaTeX": r"""
        \emptyset | \varnothing | ∅
        x \leq 3 | x \leqslant 3
        |x| | \lvert x\rvert
        \frac12 | \displaystyle\frac12
        (1,2) | \bigl(1,2\bigr)
        e^2 | \mathrm{e}^2
        \frac13 | 0.\bar{3} | 0.\dot{3}
        10000 | 10\,000
        10\,000 | 10000
    """,
}
DIFFERENT = {
    "values of other letters, letters of no unit": r"""
        (1,2) | y=1, x=2
        x=2, y=3 | 3, 2 | (3,2)
        x=1,\ y=2 | (2,1) | 2, 1
        x=2, y=3, z=4 | 2,4,3
        5 | \(-x = 5\)
        \sqrt{5} | -x = \sqrt{5}
        \frac{1}{2} at^2 | \frac{1}{2}
        v_0 + \frac12 at | v_0 + \frac12
        2\pi rst | 2\pi
        x>1 and x<5 | x>1 or x<5
        x<1 or x>2 | x<1 and x>2
        y' = 2x | y = 2x
    """,
    "products by brackets, other letters, differences of letters": r"""
        9 | \(4(5)\) | 4(5)
        18 | \(12(6)\) | \frac{15(3)}{1}
        \frac92 | 4\left(\frac12\right)
        3 | \sqrt{4(5)}
        13.5 | \(12(1.5) = 13.5\) | 12(1.5) = 13.5
        x^2+5 | x^2+2(3)
        \pi(R^2-r^2) | 0 | \pi(r^2-R^2)
        \frac{R}{r} | 1 | \frac{r}{R}
        3R^2 | 3r^2
        2A+b | 2a+B
        p - q | q-p | p+q | p
    """,
    "behind an answer": r"""
        18 | **18** million | $18$ or $19$ | \(18\) \(19\) | $18$% off | $18$, $19$
        B | $B$ or $C$. | B) 12, C 13 | B. C. | B) 12 or C is right | B) 12; c
    """,
    "no name, another choice": r"""
        5 | 3 or x = 5 | or = 5 | 2x = 5 | x/2 = 5 | no = 5 | x is 4 y = 5 | 4 = 5 | a = 4 = 5 | 3a+2 = 5b = 6
        B) 12 | C | A | B) 13
        A. Smith | A
        C. elegans | C
    """,
    "what only begins alike": r"""
        \frac{1}{2} | √½
        \frac{\sqrt3}{4} | √¾
        1.5 | 3/½
        3 | 6÷½
        \frac83 | 8^⅓
        \frac{x}{2} | x^½
        1011_2 | 1011_3 | 1111_2
        17_{8} | 17_{10}
        \cos 20^\circ | \cos 20
    """,
    "two answers": r"""
        \frac12 | \frac13 == \frac12 | \frac13 ≡ \frac12 | \frac13 ≟ \frac12 | \frac13 ≐ \frac12 | \frac13 ≔ \frac12
        \frac12 | \frac12 ≅ \frac13 | \frac12 ≃ \frac13 | \frac12 ⇒ \frac13 | \frac12 → \frac13 | \frac13 ∨ \frac12
        \frac12 | \frac12; \frac13 | \frac12、\frac13
        \frac{1}{3} | C. 3 \frac{1}{3} ** 10^{-20} \
    """,
    "small and close numbers": r"""
        9.1\times10^{-31} | 1.6\times10^{-19} | 9.1\times10^{-32} | 9.11\times10^{-31} | 0
        10^{-21} | 10^{-20} | 10^{-22} | -10^{-21} | 0
        0 | 10^{-30} | \frac{1}{100!} | e^{-80} | \sqrt{2}\cdot10^{-25} | 1e-30
        \sqrt{2} | \sqrt{2}+10^{-20} | \sqrt{2+10^{-20}}
        x^2 = 10^{-40} | x^2 = 10^{-42}
        \log(1+10^{-20}) | \log(1+10^{-21})
        \ln(1+10^{-20}) | \ln(1+10^{-21})
        \sin(\pi+10^{-20}) | \sin(\pi+10^{-21})
        |x| + 10^{-20} | |x| + 10^{-21}
        \frac{1}{21!} | \frac{1}{20!} | \frac{1}{22!}
        \frac{1}{2006!} | \frac{1}{2004!} | \frac{1}{2005!}
        e^{-60} | e^{-50} | e^{-61} | 2e^{-60}
        1-\frac{1}{2^{99}} | 1-\frac{1}{2^{100}} | 1 | 1-2^{-98}
        1-2^{-10000} | 1-2^{-9999} | 1
        \sqrt{3}\cdot 10^{-20} | \sqrt{2}\cdot 10^{-20} | \sqrt{3}\cdot 10^{-21}
        \frac{1}{2^{98}} | \frac{1}{2^{99}} | 2^{-97}
        10^{-20}x | 10^{-21}x | 2\cdot10^{-20}x | 10^{-20}y
        x + 10^{-30} | x + 10^{-31} | x
        \{10^{-20}, 1\} | \{10^{-21}, 1\}
        (10^{-20}, 2) | (10^{-21}, 2)
        [10^{-20}, 1] | [10^{-21}, 1]
        \begin{pmatrix} 10^{-20} \\ 1 \end{pmatrix} | \begin{pmatrix} 10^{-21} \\ 1 \end{pmatrix}
        10^{20} | \sqrt{10^{40}+1} | 10^{20}+10^{-20}
        \frac{\pi}{10^{18}} | \frac{e}{10^{18}}
        \sin(10^{-20}) | \sin(10^{-21})
        x = 10^{-20} | x = 10^{-21}
        10^{-20} + 10^{-21} i | 10^{-20} + 10^{-22} i
        \frac13 | 0.333333 | 0.33333333333333333333
        \sqrt{2} | 1.41421356237309504880
        \pi | 3.14159265358979323846 | \frac{22}{7}
    """,
    "units": r"""
        5 minutes | 5 hours | 5 seconds | 5 h | 5\text{ hours} | 5 apples | $5 | 5 h.
        3 days | 3 hours | 3 weeks
        5\text{ m} | 5\text{ cm} | 5 cm | 5 km | 5 minutes | 5\text{ mm} | 5 m^2 | 5\text{ m/s}
        5\text{ cm}^3 | 5\text{ cm}^2 | 5\text{ cm} | 5 square cm | 5 cm²
        5 square units | 5 cubic units
        10\text{ dollars} | 10\text{ cents} | 10 cents | 10 euros | €10 | 10 yen | 10 hours
        \$10 | 10 cents | 10¢ | €10 | 10 hours | 10 kg
        20 miles | 20 km | 20 kilometers | 20 miles per hour
        60 mph | 60 km/h | 60 miles | 60 km per hour
        7 kg | 7 pounds | 7 g | 7 grams | 7 lbs
        25 °C | 25 °F | 25 degrees Fahrenheit
        60 degrees | 60 radians | 60 cm
        4 boys | 4 girls
        5 apples | 5 oranges | 5 hours
        5 am | 5 pm
        9\pi\text{ cm}^2 | 9\pi\text{ cm} | 9\pi\text{ m}^2 | 9π cm
        \frac{1}{2}\text{ hour} | \frac{1}{2}\text{ minute} | 0.5 minutes | 30
        3\text{ cm}, 4\text{ cm} | 3\text{ m}, 4\text{ m}
        1 hour | 60 minutes
        5小时 | 5分钟
        12 cm | The length is \boxed{12} m.
    """,
    "numbers with words, mixed numbers": r"""
        \frac{5}{2} | 2 1/3 | 2 1/2 million | 2 or 1/2 | 2 1/2 or 3 | about 2 1/2 | 1/2 | 21/2 | 2, 1/2
        2 1/4 | \frac12 | \frac{21}{4} | \frac{3}{2}
        \frac{5}{4} | 1 1/5 | 1.25 million | 125 | 1 1/4 squared
        (2.5, 3) | (2 1/3, 3)
        1 | 2 1/2
    """,
    "Unicode": r"""
        10-2\sqrt{5} | 10 - √5 | 10 + 2√5 | 10 - 2√6 | √(10 - 2·5)
        \sqrt{1}2 | √12
        \sqrt[3]{2} | √2 | ∜2
        3 | 3次方 | 3平方 | 3方 | 3立方 | 3次幂 | 3平方根 | 3倍
        x^2 | x³ | x₂ | x2
        \frac{1}{2} | ⅓ | 1½ | ½½ | ½ or ⅓ | x½
        2 | 2½ | 2² | ½ | 2π | 2√1 3 | 2个半 | ②③
        60^\circ | 60′ | 61°
        \infty | -∞ | ∞ or 0 | −∞
        6 | 2×4 | 2×3 or 7 | 6×6 | 2±4 | ≤6 | 6÷
        12 | 12万 | 12千 | 12百 | 12亿 | 12兆 | 12十 | 12个半 | 12半 | 12倍 | 12多 | 12余 | 12几 | 12分之一
        12 | 12次方 | 12打 | 12对
        12 | 12个以上 | 12个左右 | 12元或13元 | 12个不到 | 大约12 | 不是12 | 一12 | 12成 | 12折
        12 | 12万元 | 12千元 | 12双 | 12的平方 | 12萬
        \frac{1}{2}x | ½y | 1/(2x)
        x \leq 5 | x ≥ 5 | x < 5 | x ≠ 5
        x \neq 3 | x = 3
        18 | 1８9 | −18 | 18−0−1 | ١٨
    """,
    "choices and words": r"""
        B | A or B | A, B | B or C | B) or C) | B, C | B and C | (B)(C) | (b) | A | AB | BC
        B | C. B | not B | BB | 8 | B C | B 12
        B | B) 12 C) 13
        B | B) 12 or C | B. or C. | B: 12, C: 13 | **A** **B** | В | β | B/C | B? C! | B) not sure, maybe C | ABCD
        A | A cat | a cat | an | A or b | A) 1 b) 2 | All | a or b
        b | B | (B)
        x | X
        X | x | x.
        AB | ab
        B, D | B | D | B, C | B, C, D | B,D,E | A, B, C, D | D, B | B or D | BD
        even | not even | even or odd | odd | Even, odd | uneven | even and odd | even odd | evens
        True | False | true or false | not true | t | truefalse | true, false
        Paris | paris
        no solution | solution | no solutions or 5
        ab | AB | Ab
        5 | .5 | 5.5
        red, blue | red | blue, red | red, blue, green | red or blue
    """,
    "boxes": r"""
        5 | \boxed{4} or \boxed{5} | \boxed{5} \boxed{4} | \boxed{4}, \boxed{5} | It is not \boxed{5}
        5 | It is 4 or \boxed{5}
        5 | \boxed{5} million | \boxed{5} or more | \boxed{5} squared | minus \boxed{5} | -\boxed{5} | 2\boxed{5}
        5 | x \boxed{5}
        5 | 1/\boxed{5} | \boxed{5}/2 | \boxed{5}% of 6
        5 | \boxed{5} k | \boxed 6 | \boxed{5}\boxed{6} | five or \boxed{6} | 4 \boxed{5}
        5 | \boxed{\boxed{5} or 6} | y + 1 = \boxed{5} | \boxed{5} = 6
        5 | The answer is \boxed{}. | The answer is \boxed{5
        x = 5 | y = \boxed{5}
        5 cm | The length is \boxed{5} m.
    """,
}


def lines_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]


def rows(tables: dict[str, str]) -> list[tuple[str, str]]:
    return [(text, gold) for table in tables.values() for gold, *texts in lines_of(table) for text in texts]


@pytest.fixture(scope="module", autouse=True)
def math_verify():
    pytest.importorskip("math_verify")
    yield
    math_process.stop()


def worth(text: str, gold: str) -> float:
    return correctness_reward(["?"], [f"<answer>{text}</answer>"], answer=[gold])[0]


def test_right_answers_are_rewarded():
    assert [row for row in rows(EQUAL) if worth(*row) == 0.0] == []


def test_wrong_answers_are_not_rewarded():
    assert [row for row in rows(DIFFERENT) if worth(*row) > 0.0] == []


# --- other values, judged by exact arithmetic


def forms_of(value: Fraction) -> list[str]:
    top, bottom, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    whole, rest = divmod(top, bottom)
    forms = [f"{sign}{top}/{bottom}", rf"{sign}\frac{{{top}}}{{{bottom}}}"]
    forms += [rf"\frac{{{sign}{7 * top}}}{{{7 * bottom}}}"]
    if whole and rest:
        forms += [f"{sign}{whole} {rest}/{bottom}", f"{sign}{whole} {rest}/{bottom} km"]
    if 10**6 % bottom == 0:
        forms += [f"{float(value):.6f}", f"{float(value):.6f} km", f"{sign}{float(abs(value)):.7f}".replace("-", "−")]
    return forms


VALUES = st.builds(Fraction, st.integers(-40, 40), st.sampled_from([1, 2, 3, 4, 5, 8, 12]))


@settings(max_examples=60, deadline=None)
@given(VALUES, VALUES, st.data())
def test_rational_numbers_are_equal_however_they_are_written(value, other, data):
    text, gold = (data.draw(st.sampled_from(forms_of(number))) for number in (value, value))
    assert worth(text, gold) > 0.0
    assert (worth(data.draw(st.sampled_from(forms_of(other))), gold) > 0.0) is (value == other)


POWERS = st.tuples(st.integers(1, 30), st.integers(-40, 40))


@settings(max_examples=60, deadline=None)
@given(
    POWERS,
    POWERS | st.none(),
    st.sampled_from(["{0} \\times 10^{{{1}}}", "\\frac{{{0}}}{{10^{{-{1}}}}}", "10^{{{1}}} \\cdot {0}x"]),
)
def test_small_and_large_numbers_are_compared_by_their_size(gold, text, form):
    """Also as coefficients, and under a root: where the squares are equal."""
    text = text or gold
    is_equal = text[0] * Fraction(10) ** text[1] == gold[0] * Fraction(10) ** gold[1]
    assert (worth(form.format(*text), form.format(*gold)) > 0.0) is is_equal
    roots = [rf"\sqrt{{{number}}} \cdot 10^{{{power}}}" for number, power in (text, gold)]
    is_equal = text[0] * Fraction(100) ** text[1] == gold[0] * Fraction(100) ** gold[1]
    assert (worth(*roots) > 0.0) is is_equal


UNITS = """
    seconds sec s | minutes min mins minute | hours hr hrs h | days day | weeks wk | years yrs | cm centimeters
    m meters metre | km kilometres | inches in inch | feet ft foot | miles mi | g grams gram | kg kilograms
    pounds lbs lb | liters litres | ml milliliters | gallons gal | dollars dollar bucks | cents cent | euros | percent
    cats cat | dogs | cherries cherry | boxes box | people | students | m/s | km/h | m^2 | m^3
"""
UNITS = list(chain.from_iterable(lines_of(UNITS)))


def test_each_unit_is_another():
    for i, names in enumerate(UNITS):
        for j, others in enumerate(UNITS):
            for name in names.split() if i != j else []:
                assert worth(rf"7\text{{ {name}}}", f"7 {others.split()[0]}") == 0.0, (name, others)
        for name in names.split():
            assert worth(f"7 {name}", names.split()[0].join(["7 ", ""])) > 0.0
            assert worth("7", rf"7\text{{ {name}}}") > 0.0


PIECES = r"""
    2 | 3 | ½ | ⅓ | B | C | b | c | B) | C. | (B) | (C) | even | odd | or | and | , | 、 | / | = | \boxed{2} | \boxed{3}
    \boxed 2 | \boxed 3 | \fbox{B} | The answer is | not | $ | ** | 个 | 万 | ² | cm | × | ± | ÷ | \text{ or } | million
    apples | 。 | : | ≡ | % | x
"""
PIECES = ["|", " ", *chain.from_iterable(lines_of(PIECES))]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=2, max_size=6), st.sampled_from(["", " "]))
def test_no_answer_is_right_for_two_golds(pieces, separator):
    text = separator.join(pieces)
    for golds in (["2", "3", r"\frac{1}{2}", r"\frac{1}{3}"], ["B", "C"], ["even", "odd"]):
        assert sum(worth(text, gold) > 0.0 for gold in golds) <= 1


@needs_gsm8k
def test_golds_of_gsm8k_are_right_in_several_forms_and_the_next_number_is_not():
    lines = (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines[::40]:
        gold = json.loads(line)["answer"].split("####")[1].strip()
        number = int(gold.replace(",", ""))
        bare, boxed = ["${0:,}", "{0}.00", "{0}个", "x={0} km"], [r"\boxed {0}", r"\fbox{{{0}}}"]
        for form in (*bare, *boxed, r"So it is \boxed{{{0}}} dollars."):
            assert worth(form.format(number), gold) > 0.0
            assert worth(form.format(number + 1), gold) == 0.0


# --- answers without tags


LAST_NUMBERS = {
    "so 3/4": "3/4",
    "so 0.75.": "3/4",
    "it is 20-18": "18",
    "it is 20 - 18": "18",
    "2.5e3": "2500",
    "about 1E-3.": "0.001",
    "it is −5": "-5",
    "x=−5.": "-5",
    "20−18": "18",
    "10–18": "18",
    "(-5)": "-5",
    "it is -$5.": "-5",
    "we need 2 1/2 cups": "5/2",
    "we need 2½ cups": "2.5",
    "it is ½": "1/2",
    "１８": "18",
    "it is .5": "0.5",
    "on 12/25/2020": "2020",
    "version 1.2.3": "3",
    "f(3)-4": "4",
    "$1,234.50": "1234.5",
    "14{,}400": "14400",
    r"14,\!400": "14400",
    r"14\,400 people": "14400",
    "so 18": r"\boxed{18}",
}


def test_the_last_number_is_read_whole_and_with_its_own_sign():
    golds = list(LAST_NUMBERS.values())
    assert last_number_reward(list(LAST_NUMBERS), golds) == [1.0] * len(golds)
    wrong = [4, 4, -18, -18, 3, 3, 5, 5, -18, -18, 5, 5, 2, 2, 2, 8, 5, 12, 1.2, -4]
    assert last_number_reward(list(LAST_NUMBERS)[:20], list(map(str, wrong))) == [0.0] * 20
