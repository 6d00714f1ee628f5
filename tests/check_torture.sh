#!/bin/bash
# Every foreign function that daemon, library and kvpackctl call is either made to fail by tests/torture.c (it
# is in tests/torture_calls.h), or cannot fail in a way that matters, and is listed here with why.
# A new function has to be put into one of the two.

cd "${KVP_TOP:?}" || exit 1

harmless="
# text, memory, numbers
XXH3_64bits XXH3_64bits_reset_withSeed XXH3_64bits_update XXH3_64bits_digest XXH3_128bits __popcountdi2 memchr memcmp memcpy memmove memset qsort snprintf vsnprintf sprintf strchr strcmp strcspn
strdupa strerror strerrordesc_np strftime strlen strncmp strncpy strrchr strspn strstr strtok_r strtol
strtoul strtoull realpath gmtime_r inet_ntop inet_pton in6addr_loopback bsearch abs
# protobuf-c and cJSON: allocate by hooks or allocators that fail, or do not allocate
protobuf_c_empty_string protobuf_c_message_free_unpacked protobuf_c_message_get_packed_size
protobuf_c_message_pack protobuf_c_message_pack_to_buffer protobuf_c_buffer_simple_append protobuf_c_message_check cJSON_*
# a descriptor is gone whatever close says; what is freed is free
close fclose free freeifaddrs munmap shutdown uv_close uv_freeaddrinfo
# cannot fail with these arguments
clock_gettime getegid getenv geteuid getgrnam getpid gettid getrandom getopt_long optarg optind signal sigaction sigemptyset
pthread_mutex_destroy pthread_mutex_init pthread_mutex_lock pthread_mutex_unlock pthread_join pthread_once pthread_self
pthread_setname_np pthread_sigmask sigfillset pthread_setaffinity_np sem_destroy sem_init sem_post sem_wait umask unsetenv timerfd_settime isatty sysconf sched_yield mallinfo2
stat access getsockname
uv_async_send uv_buf_init uv_idle_init uv_idle_start uv_idle_stop uv_ip4_addr uv_ip4_name uv_ip6_addr
uv_ip6_name uv_is_active uv_is_closing uv_loop_close uv_now uv_poll_start uv_poll_stop uv_prepare_init
uv_prepare_start uv_run uv_stream_get_write_queue_size uv_strerror uv_timer_init uv_timer_start
uv_timer_stop uv_update_time uv_read_stop
# arguments, and what is sorted with
alphasort strtod globfree
# output that nobody waits for; kvpackctl looks at its stream's error in the end
putc feof stdin fflush fgets ferror fprintf printf fwrite fputc fputs putchar puts vfprintf stderr stdout
# the way out
_exit abort __assert_fail exit
# libraries that are looked up while running: their absence is tests/test_gpu's and test_nic's
dlopen dlsym dlclose dlerror
ini_parse_stream
# UCX and verbs: no result, or one that is a state
ucp_cleanup ucp_config_release ucp_ep_close_nbx ucp_get_version ucp_get_version_string
ucp_request_check_status ucp_request_free ucp_worker_destroy ucp_worker_progress
ucp_worker_release_address uct_release_component_list ucp_mem_unmap ucp_request_cancel ucs_status_string
ibv_ack_async_event ibv_ack_cq_events ibv_close_device ibv_dealloc_pd ibv_dereg_mr ibv_destroy_ah
ibv_destroy_comp_channel ibv_destroy_cq ibv_destroy_qp ibv_free_device_list ibv_get_device_name
ibv_port_state_str ibv_wc_status_str
# librdmacm: what is given back or destroyed is; the port of an id that listens is known
rdma_ack_cm_event rdma_destroy_event_channel rdma_destroy_id rdma_get_src_port
# displays and parsers: what they make of nothing is shown as nothing
open_memstream sscanf ucp_config_print ucp_ep_print_info
program_invocation_short_name environ
"

tortured=$(sed -n 's/^\tCALL.\([a-z0-9_]*\),.*/\1/p' tests/torture_calls.h)
listed=" $(grep -v '^#' <<<"$harmless" | tr '\n' ' ') $(tr '\n' ' ' <<<"$tortured") "

foreign() # what these archives want and do not have, without what compilers put in
{
	comm -23 <(nm -u "$@" 2>/dev/null | awk '$1 == "U" { print $2 }' | sort -u) \
		<(nm --defined-only "$@" 2>/dev/null | awk 'NF == 3 { print $3 }' | sort -u) |
		sed -E 's/^__([a-z_]+)_chk$/\1/; s/^__isoc[0-9]+_//' |
		grep -vE '^(__(asan|ubsan|tsan|sanitizer|stack_chk|errno|ctype|tls|sched|cxa|libc|popcount|gcov|llvm|start|stop)|_GLOBAL_OFFSET|kvp_move_)' | sort -u
}

bad=0
for name in $(foreign "$KVP_BIN/libkvpackd.a" "$KVP_BIN/libkvpack.a" "$KVP_BIN/libkvp-proto.a" "$KVP_BIN/daemon/main.o" \
	"$KVP_BIN"/client/ctl*.o); do
	[[ $name == cJSON_* || $listed == *" $name "* ]] && continue
	echo "$name: neither in tests/torture_calls.h nor among the harmless of $0"
	bad=1
done
exit $bad
