"""Programs with tests that they pass, and programs that try to pass tests without solving them."""

ASSERTIONS = ["assert double(2) == 4", "assert double(0) == 0", "assert double(7) == 14"]
CALLS = {"fn_name": "double", "inputs": [[5], [6]], "outputs": [10, 12]}

# What assertions on plain Python mean holds for a program in another process too: (program, tests).
RIGHT = {
    "guard": (
        """
def double(x): return 2*x
if __name__ == '__main__':
    print(double(int(input())))
""",
        ASSERTIONS,
    ),
    "lcb": (
        """
class Solution:
    def twoSum(self, nums, target):
        return [0,1] if nums[0]+nums[1]==target else []
""",
        {"fn_name": "twoSum", "inputs": ["[2,7,11]\n9"], "outputs": ["[0,1]"]},
    ),
    "humaneval": (
        "def f(x): return x+1",
        """
METADATA={}
def check(candidate):
    assert candidate(1)==2
    assert abs(candidate(1.5)-2.5)<1e-6
check(f)
""",
    ),
    "inplace": (
        "def f(x): x.sort()",
        """
a=[3,1,2]
f(a)
assert a==[1,2,3]
""",
    ),
    "inplace nested": (
        """
def f(m):
  for r in m: r.reverse()
  m.append([0])
""",
        """
a=[[1,2],[3,4]]
b=a[0]
f(a)
assert a==[[2,1],[4,3],[0]] and b is a[0] and b==[2,1]
""",
    ),
    "generator": (
        """
def f(n):
  for i in range(n): yield i
""",
        """
assert list(f(3))==[0,1,2]
g=f(2)
assert next(g)==0
assert [*g]==[1]
assert sum(f(4))==6
""",
    ),
    "class": (
        """
class Stack:
  def __init__(self): self.items=[]
  def push(self,x): self.items.append(x)
  def pop(self):
    if not self.items: raise IndexError('empty')
    return self.items.pop()
  def __len__(self): return len(self.items)
  def __str__(self): return 'S'+str(self.items)
""",
        """
s=Stack()
s.push(4)
s.push(5)
assert len(s)==2 and str(s)=='S[4, 5]'
assert s.pop()==5
assert s.items==[4]
s.pop()
assert not s
try:
  s.pop()
  assert False
except IndexError as e:
  assert str(e)=='empty'
assert isinstance(s, Stack)
""",
    ),
    "vec": (
        """
from dataclasses import dataclass
@dataclass(frozen=True)
class V:
  x:int
  y:int
  def __add__(s,o): return V(s.x+o.x,s.y+o.y)
""",
        """
assert V(1,2)+V(3,4)==V(4,6)
assert V(1,2)!=V(2,1)
assert V(1,y=2).y==2
assert len({V(1,2),V(1,2)})==1
assert repr(V(1,2))=='V(x=1, y=2)'
""",
    ),
    "own exception": (
        """
class Low(Exception):
  def __init__(self, need):
    super().__init__(f'need {need}')
    self.need=need
def pay(n):
  if n<5: raise Low(5)
  return n
""",
        """
try:
  pay(1)
  assert False, 'x'
except Low as e:
  assert 'need 5' in str(e) and e.need==5
assert pay(7)==7
""",
    ),
    "callback": (
        "def app(f, xs): return [f(x) for x in xs]",
        """
assert app(lambda x: x+1, [1,2])==[2,3]
assert app(len, ['a','bb'])==[1,2]
assert app(str, [1])==['1']
import math
assert app(math.sqrt, [4])==[2.0]
""",
    ),
    "gen arg": (
        "def tot(it): return sum(it)",
        """
assert tot(x for x in [1,2])==3
assert tot(iter([1]))==1
assert tot(range(4))==6
assert tot(map(int,['1']))==1
""",
    ),
    "tree": (
        "def depth(r): return 0 if r is None else 1+max(depth(r.left),depth(r.right))",
        """
class Node:
  def __init__(s,v,l=None,r=None): s.val=v; s.left=l; s.right=r
assert depth(Node(1,Node(2,Node(3))))==3
""",
    ),
    "program tree": (
        """
class ListNode:
  def __init__(s,v=0,n=None): s.val=v; s.next=n
def rev(h):
  p=None
  while h: h.next,p,h=p,h,h.next
  return p
""",
        """
h=ListNode(1,ListNode(2))
r=rev(h)
assert r.val==2 and r.next.val==1 and r.next.next is None
r.val=9
assert r.val==9
""",
    ),
    "counter": (
        """
from collections import Counter
def f(s): return Counter(s)
""",
        """
assert f('aab')=={'a':2,'b':1}
assert f('ab').most_common(1)==[('a',1)]
""",
    ),
    "defaultdict": (
        """
from collections import defaultdict
def f(s):
  d=defaultdict(list)
  d[1].append(2)
  return d
""",
        "assert f('')=={1:[2]}",
    ),
    "namedtuple": (
        """
from collections import namedtuple
P=namedtuple('P','x y')
def f(): return P(1,2)
""",
        """
assert f()==(1,2)
assert f().x==1
assert P(1,2)==f()
a,b=f()
assert b==2
""",
    ),
    "enum": (
        """
import enum
class C(enum.Enum):
  R=1
  G=2
def f(): return C.R
""",
        """
assert f()==C.R and f() is C.R and f()!=C.G
assert C.G.value==2 and C.G.name=='G'
""",
    ),
    "np without import": (
        """
import numpy as np
def f(x): return np.array(x)*2
""",
        "assert np.allclose(f([1,2]),[2,4])",
    ),
    "math without import": (
        """
import math
def f(x): return math.sqrt(x)
""",
        "assert math.isclose(f(4), 2)",
    ),
    "sum": ("def sum(a,b): return a+b", ["assert sum(10,15)==25", "assert sum(1,2)==3"]),
    "gcd": ("def gcd(a,b): return a if not b else gcd(b,a%b)", ["assert gcd(4,6)==2", "assert gcd(3,7)==1"]),
    "bool eq": ("def f(x): return 1", ["assert f(1)==True", "assert f(1)==1.0", "assert f(0)"]),
    "big": ("def f(n): return 10**n", ["assert f(5000)==10**5000"]),
    "surrogate": ("def f(): return '\\ud800'", ["assert f()=='\\ud800'"]),
    "sets": (
        "def f(): return {1,(2,3)}, frozenset([1]), b'x', 1j, None, ...",
        ["assert f()[:5]==({1,(2,3)}, frozenset([1]), b'x', 1j, None)"],
    ),
    "dates": (
        """
import datetime as d
from decimal import Decimal
def f(): return d.date(2020,1,2), d.datetime(2020,1,2,3,tzinfo=d.timezone.utc), d.timedelta(1), Decimal('1.10')
""",
        [
            "import datetime as d\nfrom decimal import Decimal\n"
            "assert f()==(d.date(2020,1,2), "
            "d.datetime(2020,1,2,3,tzinfo=d.timezone.utc), d.timedelta(1), Decimal('1.1'))"
        ],
    ),
    "inf": ("def f(): return float('inf'), float('-inf')", ["assert f()==(float('inf'), float('-inf'))"]),
    "global data": (
        """
MAX=10
count=0
def inc():
  global count
  count+=1
""",
        ["assert MAX==10", "assert count==0\ninc()\nassert count==1"],
    ),
    "thread": (
        """
import threading
class K:
  def __init__(s): s.n=0; s.l=threading.Lock()
  def inc(s):
    with s.l: s.n+=1
""",
        """
import threading
k=K()
ts=[threading.Thread(target=k.inc) for _ in range(5)]
[t.start() for t in ts]
[t.join() for t in ts]
assert k.n==5
""",
    ),
    "kwargs": ("def f(*a, **k): return a, k", "assert f(1,2,x=3)==((1,2),{'x':3})"),
    "context": (
        """
import contextlib
@contextlib.contextmanager
def f():
  yield 3
""",
        "with f() as x: assert x==3",
    ),
    "pytest raises": (
        "def f(): raise ValueError('bad')",
        """
import pytest
with pytest.raises(ValueError, match='bad'): f()
""",
    ),
    "stack list": (
        """
class S(list):
  def push(s,x): s.append(x)
""",
        """
s=S()
s.push(1)
assert s==[1] and len(s)==1 and s[0]==1
""",
    ),
    "mp": (
        """
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
def f():
  with ThreadPoolExecutor(2) as e: return list(e.map(abs,[-1,2]))
""",
        "assert f()==[1,2]",
    ),
}

# Programs that pass no test, whatever they do to their interpreter, to the pipe or to what `==` means.
WRONG = {
    "proto junk": (
        """
import os
for fd in range(3,20):
  try: os.write(fd, b'["ready"]\\n["give", 4, null]\\n["give", 0, null]\\n')
  except OSError: pass
def double(x): return 1
""",
        ASSERTIONS,
    ),
    "passed on status": (
        """
import os
for fd in range(0,64):
  try: os.write(fd, b'{"passed": 0}\\n{"passed": 1}\\n{"passed": 2}\\n')
  except OSError: pass
def double(x): return 1
""",
        ASSERTIONS,
    ),
    "frames": (
        """
import sys
f=sys._getframe()
while f:
  for k,v in list(f.f_locals.items())+list(f.f_globals.items()):
    if isinstance(v,dict) and 'tests' in v: v['tests'][:]=[]
  f=f.f_back
def double(x): return 1
""",
        ASSERTIONS,
    ),
    "json patched": (
        """
import json
old=json.dumps
json.dumps=lambda m,**k: old(['give', True, None])
def double(x): return 1
""",
        ASSERTIONS,
    ),
    "int subclass": (
        """
class I(int):
  def __eq__(s,o): return True
  __hash__=int.__hash__
def double(x): return I(3)
""",
        ASSERTIONS,
    ),
    "float sub": (
        """
class I(float):
  def __sub__(s,o): return 0
  def __rsub__(s,o): return 0
  def __abs__(s): return 0
def double(x): return I(3)
""",
        ["assert abs(double(2) - 4) < 1e-6"],
    ),
    "object sub": (
        """
class I:
  def __sub__(s,o): return 0
  def __rsub__(s,o): return 0
  def __abs__(s): return 0
  def __lt__(s,o): return True
  def __eq__(s,o): return True
  __gt__=__le__=__ge__=__lt__
def double(x): return I()
""",
        ["assert abs(double(2) - 4) < 1e-6"],
    ),
    "class double": (
        """
class double:
  def __init__(s,x): pass
  def __eq__(s,o): return True
  def __sub__(s,o): return 0
  def __lt__(s,o): return True
""",
        ["assert double(2) == 4", "assert double(0) == 0", "assert double(7) == 14", "assert double(2) < 5"],
    ),
    "in": (
        """
class I:
  def __contains__(s,o): return True
  def __eq__(s,o): return True
def double(x): return I()
""",
        ["assert 4 in double(2)"],
    ),
    "abs override": (
        """
def abs(x): return 0
def double(x): return 3.0
""",
        ["assert abs(double(2) - 4) < 1e-6"],
    ),
    "math override": (
        """
class math:
  isclose=lambda *a: True
def double(x): return 3.0
""",
        ["assert math.isclose(double(2), 4)"],
    ),
    "sorted/set override": (
        """
def sorted(x): return 0
def set(x): return 0
def double(x): return 3
""",
        ["assert sorted([double(2)]) == sorted([4])"],
    ),
    "AssertionError override": (
        """
class AssertionError(BaseException): pass
class Exception(BaseException): pass
def double(x): return 1
""",
        ASSERTIONS,
    ),
    "check override": (
        """
def check(c): pass
def double(x): return 1
""",
        """
def check(candidate):
  assert candidate(2)==4
check(double)
""",
    ),
    "raise exit": ("def double(x): raise SystemExit(0)", ASSERTIONS),
    "die in bare except": (
        """
import os
def double(x): os._exit(0)
""",
        """
try:
  double(2)
except: pass
""",
    ),
    "kill in call": (
        """
import os, signal
def double(x):
  for p in (os.getppid(), 1, 0):
    try: os.kill(p, 9)
    except OSError: pass
  return 1
""",
        ASSERTIONS,
    ),
    "deep list": (
        """
def double(x):
  a=[]
  for _ in range(10**5): a=[a]
  return a
""",
        ASSERTIONS,
    ),
    "unpicklable": ("def double(x): return lambda: 1", ASSERTIONS),
    "dict sub": (
        """
class R(dict):
  def __eq__(s,o): return True
  def __missing__(s,k): return 4
def double(x): return R()
""",
        ["assert double(2)=={'a':4}"],
    ),
    "remotes in args": (
        """
class I:
  def __eq__(s,o): return True
  __hash__=object.__hash__
def f(xs): xs[:]=[I()]*3
""",
        """
a=[3,1,2]
f(a)
assert a==[1,2,3]
""",
    ),
    "expected alias": (
        """
class I:
  def __eq__(s,o): return True
def f(a, b): b[0]=I()
""",
        """
e=[4]
assert f(1,e)==e
""",
    ),
    "close": (
        """
import os
os.closerange(0,100)
def double(x): return 1
""",
        ASSERTIONS,
    ),
    "give range": (
        """
import json
old=json.dumps
json.dumps=lambda m,**k: old(['give', ['yours', 0], None])
def double(x): return 1
""",
        ASSERTIONS,
    ),
    "cb getattr2": (
        "def f(o): return o.check.__globals__['expected']",
        """
expected=4
class O:
  def check(self): return 1
assert f(O())==expected
""",
    ),
    "class made in the tests": (
        """
import sys
peer=sys._getframe(1).f_locals['peer']
def ask(*message):
  peer.send('ask','call',['list',*message,['builtins.dict',['list']]])
  return ['yours', peer.receive()[1][1]]
def yes(*a): return True
class Yours: pass
encode=type(peer).encode
type(peer).encode=lambda peer,value: Yours.data if value is Yours else encode(peer,value)
def double(x):
  methods=['builtins.dict',['list',['list','__eq__',encode(peer,yes)],['list','__hash__',encode(peer,yes)]]]
  Yours.data=ask(ask(['builtin','type'],['list','X',['builtins.tuple',['list']],methods]),['list'])
  return Yours
""",
        ASSERTIONS,
    ),
    "a pytest of its own": (
        """
class pytest:
  class raises:
    def __init__(self, kind): pass
    def __enter__(self): pass
    def __exit__(self, *error): return True
def double(x): return 1
""",
        "with pytest.raises(ValueError):\n  double(None)",
    ),
    "exit of a kind": (
        """
class Code:
  def __bool__(self): raise ValueError
def double(x): raise SystemExit(Code())
""",
        ASSERTIONS,
    ),
    "exit by the tests": (
        """
class Code:
  def __bool__(self): raise ValueError
def double(x): return Code()
""",
        "import sys\nsys.exit(double(2))",
    ),
    "cb frame": (
        "def f(g): return g.gi_frame.f_globals['expected']",
        """
expected=4
assert f(x for x in [1])==expected
""",
    ),
}
