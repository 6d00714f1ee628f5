/* SPDX-License-Identifier: Apache-2.0 */
/* kvpackctl against a scripted daemon: what it prints and how it exits. */

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "client/kvpack.h"
#include "tests/support_fake.h"

static struct fake *fake;
static char out[65536];

static void setup(void)
{
	fake = fake_start(NULL, 1, false);
}

static void teardown(void)
{
	fake_free(fake);
}

TestSuite(ctl, .init = setup, .fini = teardown, .timeout = 60);

static const char *bin_dir(void)
{
	const char *bin = getenv("KVP_BIN");

	return bin ? bin : "build/plain-gcc";
}

/* The exit status of a command of the shell; its output is in `out`. */
static int shell(const char *command)
{
	FILE *p = popen(command, "r");
	size_t n;
	int status;

	cr_assert_not_null(p);
	n = fread(out, 1, sizeof(out) - 1, p);
	out[n] = '\0';
	status = pclose(p);
	cr_assert(WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* Runs it with the daemon answering json; its output of both streams is in `out`. */
static int ctl(const char *args, const char *json)
{
	char command[512];

	(void)snprintf(fake->memfd_text, sizeof(fake->memfd_text), "%s", json ? json : "");
	(void)snprintf(command, sizeof(command), "KVPACK_SOCKET=%s %s/kvpackctl %s 2>&1",
		       fake->path, bin_dir(), args);
	return shell(command);
}

/* The same without a socket named, in a /run of its own where two instances serve and a third
 * has died. */
static int ctl_instances(const char *args, const char *json)
{
	char command[1024];

	(void)snprintf(fake->memfd_text, sizeof(fake->memfd_text), "%s", json);
	(void)snprintf(
		command, sizeof(command),
		"unset KVPACK_SOCKET; unshare -rm sh -ec 'mount -t tmpfs none /run; cd /run; "
		"mkdir -p kvpack/a kvpack/b kvpack/dead; ln -s %s kvpack/a/sock; "
		"ln -s %s kvpack/b/sock; ln -s /nowhere kvpack/dead/sock; cd \"$OLDPWD\"; "
		"%s/kvpackctl %s'",
		fake->path, fake->path, bin_dir(), args);
	return shell(command);
}

/* The last request that came. */
static const Kvp__Inspect *asked(void)
{
	const Kvp__ClientMsg *msg = fake_get(fake, fake_count(fake) - 1);

	cr_assert_eq(msg->body_case, KVP__CLIENT_MSG__BODY_INSPECT);
	return msg->inspect;
}

Test(ctl, tables_are_aligned)
{
	cr_expect_eq(
		ctl("pools",
		    "{\"pools\":[{\"id\":7,\"client_name\":\"prefill\",\"label\":\"k\xc3\xa9y\","
		    "\"state\":\"mapped\",\"entries\":7,\"groups\":1,\"bytes\":1610612736,"
		    "\"rooms\":2,\"pages_held\":0},{\"id\":12,\"label\":\"a\"}]}"),
		0);
	cr_expect_str_eq(
		out,
		"ID  CLIENT   LABEL  STATE   ENTRIES  GROUPS    BYTES  ROOMS  PAGES HELD\n"
		" 7  prefill  k\xc3\xa9y    mapped        7       1  1.5 GiB      2           0\n"
		"12  -        a      -             -       -        -      -           -\n",
		"%s", out);
	cr_expect_str_eq(asked()->what, "pools");
	cr_expect_eq(ctl("pools", "{}"), 0);
	cr_expect_str_eq(out, "no pools\n");
}

Test(ctl, json_is_what_the_daemon_says)
{
	cr_expect_eq(ctl("--json rooms", "{\"rooms\":[],\"ended\":3}"), 0);
	cr_expect_str_eq(out, "{\n\t\"rooms\":\t[],\n\t\"ended\":\t3\n}\n", "%s", out);
	cr_expect_not(asked()->all);
	cr_expect_eq(ctl("rooms --all", "{\"rooms\":[],\"ended\":3}"), 0);
	cr_expect_str_eq(out,
			 "no live rooms\n\n3 ended rooms are remembered (rooms --all, room ID)\n");
	cr_expect(asked()->all);
	cr_expect_str_eq(asked()->arg, "");
}

Test(ctl, room_in_full)
{
	const char *json =
		"{\"rooms\":[{\"room\":\"0x11\",\"role\":\"dest\",\"index\":2,\"label\":\"r\","
		"\"state\":\"landing\",\"age_s\":75.5,\"since_s\":0.25,\"tokens\":1000,"
		"\"arrived\":512,\"bytes\":2048,\"waits_for\":\"data\",\"waits_s\":1.5,"
		"\"client\":\"decode\",\"mode\":\"landing\",\"verdict\":\"peer\","
		"\"stages\":[{\"name\":\"offered\",\"at_ms\":0.2},{\"name\":\"accepted\",\"at_ms\":"
		"1500}],"
		"\"legs\":[{\"sender\":0,\"dest\":2,\"peer\":\"gpu-b\",\"state\":\"go\"}]}]}";

	cr_expect_eq(ctl("room 0x11", json), 0);
	cr_expect_str_eq(asked()->arg, "0x11");
	cr_expect(strstr(out, "room 0x11 dest 2: landing for 250 ms, made 1m 15s ago, label \"r\""),
		  "%s", out);
	cr_expect(strstr(out, "waits, for 1.5 s now: data"), "%s", out);
	cr_expect(strstr(out, "verdict: peer"), "%s", out);
	cr_expect(strstr(out, "stages: offered +0 ms, accepted +1.5 s"), "%s", out);
	cr_expect(strstr(out, "SENDER  DEST  PEER "), "%s", out);
	cr_expect_eq(ctl("room --label 'a b'", "{\"rooms\":[]}"), 1, "no such room");
	cr_expect_eq(ctl("room 7", "{\"rooms\":[],\"offers\":[{\"sender\":3,\"dest\":1,"
				   "\"peer\":\"gpu-b\",\"since_s\":2.5}]}"),
		     0);
	cr_expect_str_eq(out, "gpu-b offers it to sender 3, from destination 1: no engine here has "
			      "opened it, for 2.5 s now\n");
	cr_expect_eq(ctl("room --label 'a b'", "{\"rooms\":[]}"), 1, "no such room");
	cr_expect_str_eq(asked()->arg, "label:a b");
	cr_expect_eq(ctl("room 5", "{\"rooms\":[{\"state\":\"released\",\"status\":\"timeout\"}]}"),
		     1);
	cr_expect_eq(ctl("room 5", "{\"rooms\":[{\"state\":\"released\",\"status\":\"ok\"}]}"), 0);
}

Test(ctl, exit_status_says_what_is_wrong)
{
	cr_expect_eq(ctl("failures --since 10m", "{\"failures\":[]}"), 0);
	cr_expect_str_eq(asked()->arg, "600");
	cr_expect_str_eq(out, "no failures\n");
	cr_expect_eq(ctl("failures", "{\"failures\":[{\"room\":\"0x1\",\"reason\":\"x\"}]}"), 1);
	cr_expect_eq(
		ctl("lanes", "{\"lanes\":[{\"name\":\"host\",\"work\":true,\"last_turn_ms\":1}]}"),
		0);
	cr_expect_eq(ctl("lanes",
			 "{\"lanes\":[{\"name\":\"host\",\"work\":true,\"last_turn_ms\":6000}]}"),
		     1);
	cr_expect_eq(ctl("lanes", "{\"lanes\":[{\"name\":\"host\",\"work\":true,"
				  "\"last_turn_ms\":60000,\"stuck\":false}]}"),
		     0, "it waits for a peer");
	cr_expect_eq(ctl("lanes",
			 "{\"lanes\":[{\"name\":\"host\",\"last_turn_ms\":900,\"stuck\":true}]}"),
		     1);
	cr_expect_eq(ctl("status", "{\"node\":\"a\",\"stopping\":false}"), 0);
	cr_expect(!strstr(out, "CUDA"), "an older daemon: %s", out);
	cr_expect_eq(ctl("status", "{\"node\":\"a\",\"cuda\":\"not built in\"}"), 0);
	cr_expect(strstr(out, "\nCUDA not built in\n"), "%s", out);
	cr_expect_eq(ctl("status", "{\"node\":\"a\",\"limits\":[{\"name\":\"rooms\",\"used\":4,"
				   "\"max\":4}]}"),
		     1);
	cr_expect(strstr(out, "limit reached: rooms is 4; 0 refused so far\n"), "%s", out);
	cr_expect_eq(
		ctl("status",
		    "{\"node\":\"a\",\"limits\":[{\"name\":\"rooms\",\"of\":\"pool\",\"used\":4,"
		    "\"max\":4}]}"),
		0);
	cr_expect_eq(ctl("peers", "{\"peers\":[{\"state\":\"down\",\"legs\":1}]}"), 1);
	cr_expect_eq(ctl("peers", "{\"peers\":[{\"state\":\"up\",\"legs\":1}]}"), 0);
	cr_expect_eq(ctl("waiting", "{\"waiting\":[]}"), 0);
	cr_expect_eq(ctl("pins", "{\"pins\":[]}"), 0);
	cr_expect_eq(ctl("clients", "no json"), 1);
	cr_expect_eq(ctl("bogus", NULL), 2);
	cr_expect_eq(ctl("room", NULL), 2);
	cr_expect_eq(ctl("--help", NULL), 0);
	cr_expect_eq(ctl("room --help", NULL), 0);
	fake->refuse_kind = KVP__CLIENT_MSG__BODY_INSPECT;
	fake->refuse_status = KVP_STATUS_DENIED;
	cr_expect_eq(ctl("rooms", NULL), 4);
	cr_expect(strstr(out, "refused: refused by the script (denied)"), "%s", out);
	cr_expect_eq(ctl("--socket /tmp/kvpack-no-such rooms", NULL), 3);
	cr_expect_str_eq(out, "kvpackctl: no daemon listens on /tmp/kvpack-no-such: is kvpackd "
			      "running? (systemctl status kvpackd)\n");
	cr_expect_eq(ctl("version --socket /tmp/kvpack-no-such", NULL), 0);
}

/* Serves one connection, which it answers with what is no message. */
static pid_t speak_nonsense(const char *path)
{
	struct sockaddr_un addr = { .sun_family = AF_UNIX };
	int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0), conn;
	pid_t pid;
	char c;

	(void)snprintf(addr.sun_path, sizeof(addr.sun_path), "%.100s", path);
	cr_assert_eq(bind(listener, (struct sockaddr *)&addr, sizeof(addr)), 0);
	cr_assert_eq(listen(listener, 1), 0);
	pid = fork();
	if (pid == 0) {
		conn = accept(listener, NULL, NULL);
		(void)!send(conn, "nonsense", 8, 0);
		while (recv(conn, &c, 1, 0) > 0)
			;
		_exit(0);
	}
	close(listener);
	return pid;
}

Test(ctl, what_is_not_understood_is_not_called_silence)
{
	char path[128], args[256];
	pid_t pid;

	(void)snprintf(path, sizeof(path), "%.60s/other", fake->dir);
	pid = speak_nonsense(path);
	(void)snprintf(args, sizeof(args), "--socket %s status", path);
	cr_expect_eq(ctl(args, NULL), 3);
	cr_expect(strstr(out, "says what is not understood here: "), "%s", out);
	cr_expect_eq(waitpid(pid, NULL, 0), pid);
	(void)unlink(path);
}

/* Who is not in the group cannot see whether there is a socket. */
Test(ctl, a_folder_of_others_is_not_called_empty)
{
	char command[512];

	if (shell("unshare -m setpriv --reuid 65534 --regid 65534 --clear-groups true 2>&1") != 0)
		cr_skip_test("only root can be somebody else");
	(void)snprintf(command, sizeof(command),
		       "unset KVPACK_SOCKET; exec 9<%s/kvpackctl; unshare -m sh -ec 'mount -t "
		       "tmpfs none /run; mkdir -m 0750 /run/kvpack; exec setpriv --reuid 65534 "
		       "--regid 65534 --clear-groups /proc/self/fd/9 status' 2>&1",
		       bin_dir());
	cr_expect_eq(shell(command), 4);
	cr_expect(strstr(out, "may not look into /run/kvpack: are you in the group"), "%s", out);
}

Test(ctl, a_name_that_is_too_long_is_refused)
{
	char name[92] = "", args[128];

	memset(name, 'n', sizeof(name) - 1);
	(void)snprintf(args, sizeof(args), "--instance %s pools", name);
	cr_expect_eq(ctl(args, "{}"), 2);
	cr_expect(strstr(out, "n: 91 bytes, at most 90"), "%s", out);
}

Test(ctl, all_instances_are_asked)
{
	cJSON *json;

	if (shell("unshare -rm mount -t tmpfs none /run 2>&1") != 0)
		cr_skip_test("no namespaces here");
	cr_expect_eq(ctl_instances("pools 2>&1", "{}"), 1, "one of them is dead");
	cr_expect(strstr(out, "== /run/kvpack/a/sock ==\nno pools\n"), "%s", out);
	cr_expect(strstr(out, "== /run/kvpack/b/sock ==\nno pools\n"), "%s", out);
	cr_expect(strstr(out, "no daemon listens on /run/kvpack/dead/sock"), "%s", out);
	cr_expect_eq(ctl_instances("--instance b pools", "{}"), 0);
	cr_expect_str_eq(out, "no pools\n");
	cr_expect_eq(ctl_instances("--instance dead pools 2>/dev/null", "{}"), 3);
	cr_expect_eq(ctl_instances("--json pools 2>/dev/null", "{\"pools\":[]}"), 1);
	json = cJSON_Parse(out);
	cr_assert_eq(cJSON_GetArraySize(json), 2, "%s", out);
	cr_expect_str_eq(
		cJSON_GetStringValue(cJSON_GetObjectItem(cJSON_GetArrayItem(json, 1), "socket")),
		"/run/kvpack/b/sock");
	cJSON_Delete(json);
}

Test(ctl, drain_asks_first_and_shows_what_is_left)
{
	cr_expect_eq(ctl("drain --reason 'new kernel'",
			 "{\"draining\":true,\"drain_reason\":\"new kernel\",\"drain_s\":1.5,"
			 "\"rooms\":{\"dest\":2,\"send\":1}}"),
		     0);
	cr_expect_str_eq(out, "draining for 1.5 s, new kernel: no new legs, 3 rooms left\n", "%s",
			 out);
	cr_expect_str_eq(asked()->what, "status");
	cr_expect_eq(ctl("undrain", "{\"draining\":false}"), 0);
	cr_expect_str_eq(out, "takes new legs\n", "%s", out);
	cr_expect_eq(ctl("status --reason x", "{}"), 2);
}
