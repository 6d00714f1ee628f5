/* SPDX-License-Identifier: Apache-2.0 */

/* The compiled kernels, as the driver takes them. */
	.section .rodata
	.global kvp_move_image
	.balign 16
kvp_move_image:
	.incbin KVP_MOVE_IMAGE
	.section .note.GNU-stack,"",@progbits
