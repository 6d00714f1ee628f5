/* SPDX-License-Identifier: Apache-2.0 */
/* Linked into every Criterion program: its time limits, too, are longer where all is slow. */

#include <criterion/criterion.h>
#include <criterion/hooks.h>

#include "tests/support_clock.h"

/* Criterion takes a test's own limit, else its suite's. */
ReportHook(PRE_ALL)(struct criterion_test_set *set)
{
	double slow = (double)support_slow();

	FOREACH_SET(struct criterion_suite_set * suite, set->suites)
	{
		if (suite->suite.data)
			suite->suite.data->timeout *= slow;
		FOREACH_SET(struct criterion_test * test, suite->tests)
		{
			if (test->data)
				test->data->timeout *= slow;
		}
	}
}
