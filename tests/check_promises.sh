#!/bin/bash
# docs/reliability.md says which test shows what. Each name there has to be one of a test that exists:
#   `suite/test`, `suite/start_*`          Criterion: Test(suite, test)
#   `program/scenario`                     a scenario of tests/program.c
#   `test_x`, `replay_x`, `fuzz_x`, ...    tests/test_x.c; tests named behind it are in it
#   01 .. 21 in the table of failures      scenarios of replay_failures, all of them and no other

cd "${KVP_TOP:-.}" || exit 1
doc=docs/reliability.md bad=0 checked=0
error() { echo "$doc: $*"; bad=1; }

# Is there a scenario with that name (a * matches any end) in the file?
scenario() { grep -qE "\{ \"${2/\*/[a-z0-9_]*}\"," "$1"; }

while IFS=/ read -r suite name; do
	checked=$((checked + 1))
	if [ -e "tests/$suite.c" ]; then
		scenario "tests/$suite.c" "$name" || error "$suite has no scenario $name"
	else
		grep -qE "^Test\($suite, ${name/\*/[a-z0-9_]*}[,)]" tests/test_*.c ||
			error "there is no Test($suite, $name)"
	fi
done < <(grep -oE '`[a-z][a-z_0-9]*/[a-z0-9_]+\*?`|`[a-z_0-9]+/\*`' $doc | tr -d '`' | grep -vE '^(tests|docs|conf|proto|daemon|client)/' | sort -u)

while read -r program names; do
	checked=$((checked + 1))
	[ -e "tests/$program.c" ] || { error "there is no program $program"; continue; }
	for name in $names; do
		grep -qE "^Test\([a-z_0-9]+, $name[,)]|\{ \"$name\"," "tests/$program.c" || error "$program has no test $name"
	done
done < <(grep -oE '`(test|replay|fuzz|stress|bench)_[a-z_0-9]+`( `[a-z_0-9]+`(, `[a-z_0-9]+`)*)?' $doc | sed 's/, `\(test\|replay\|fuzz\|stress\|bench\)_.*//' | tr -d '`,' | sort -u)

numbers=$(sed -n '/^## 2\./,/^## 3\./s/^| \([0-9][0-9]\) |.*/\1/p' $doc)
[ "$(wc -w <<<"$numbers")" = 21 ] || error "the table of failures has $(wc -w <<<"$numbers") rows"
diff <(echo "$numbers") <(sed -n 's/^\t\t{ "\([0-9][0-9]\)", .*/\1/p' tests/replay_failures.c) ||
	error "the table of failures and replay_failures differ"

[ $checked -gt 60 ] || error "only $checked names were found: does this script still read it?"
exit $bad
