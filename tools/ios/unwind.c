/* Frames of the object for the unwinder of this program: its table `__compact_unwind` said again in DWARF's words.
 *
 * Exceptions pass through the object's functions, whose frames Apple's compilers describe in a code of 32 bits
 * (Apple's mach-o/compact_unwind_encoding.h). On x86-64 nearly all are of one kind: %rbp points to the frame, and up to
 * five registers were saved at a place below it. Each becomes a frame description entry of .eh_frame, which libunwind
 * takes at run time. The handlers' tables (__gcc_except_tab) are the same on both systems. */
#include <stdlib.h>
#include <string.h>

#include "image.h"

void __register_frame(const void *entry);

enum {
  MODE_MASK = 0x0f000000,
  RBP_FRAME = 0x01000000,
  OFFSET_SHIFT = 16,
  OFFSET_MASK = 0xff,
  SAVED_REGISTERS = 5,
  ENTRY_SIZE = 72,
  PERSONALITIES = 4,
  COMMON_SIZE = 64,
};
enum { DW_CFA_nop = 0, DW_CFA_def_cfa = 0x0c, DW_CFA_offset = 0x80, RBP = 6, RETURN = 16 };

struct compact {
  uint64_t start;
  uint32_t length, encoding;
  uint64_t personality, handlers;
};

/* What entries share (CIE), one for each personality. */
struct common {
  uint64_t personality;
  char bytes[COMMON_SIZE];
};

static char *put(char *to, const void *bytes, size_t count) {
  memcpy(to, bytes, count);
  return to + count;
}

static char *put_byte(char *to, unsigned byte) {
  *to = (char)byte;
  return to + 1;
}

static void end_record(char *record, char *at, const char *end) {
  while (at < end) at = put_byte(at, DW_CFA_nop);
  const uint32_t length = (uint32_t)(end - record - 4);
  memcpy(record, &length, sizeof length);
}

static void write_common(struct common *common) {
  const uint32_t zero = 0;
  char *at = put(common->bytes + 4, &zero, 4); /* the number of a CIE */
  at = put_byte(at, 1);                        /* version */
  at = put(at, "zPLR", 5);                     /* personality, handlers and addresses follow, each as 8 bytes */
  at = put_byte(at, 1);                        /* code in bytes */
  at = put_byte(at, 0x78);                     /* data in -8 bytes */
  at = put_byte(at, RETURN);
  at = put_byte(at, 11);
  at = put_byte(at, 0);
  at = put(at, &common->personality, 8);
  at = put_byte(at, 0);
  at = put_byte(at, 0);
  at = put(at, (const char[]){DW_CFA_def_cfa, RBP, 16}, 3);
  at = put(at, (const char[]){(char)(DW_CFA_offset | RBP), 2, (char)(DW_CFA_offset | RETURN), 1}, 4);
  end_record(common->bytes, at, common->bytes + COMMON_SIZE);
}

static const struct common *find_common(struct common *all, unsigned *count, uint64_t personality) {
  for (unsigned index = 0; index < *count; index++) {
    if (all[index].personality == personality) return &all[index];
  }
  if (*count == PERSONALITIES) return NULL;
  struct common *made = &all[(*count)++];
  made->personality = personality;
  write_common(made);
  return made;
}

static void write_entry(char *entry, const struct compact *compact, const struct common *common) {
  /* DWARF's numbers of rbx, r12, r13, r14 and r15, which Apple numbers from 1. */
  static const unsigned char numbers[] = {0, 3, 12, 13, 14, 15, 0, 0};
  const uint32_t back = (uint32_t)(entry + 4 - common->bytes);
  const uint64_t length = compact->length;
  char *at = put(entry + 4, &back, 4);
  at = put(at, &compact->start, 8);
  at = put(at, &length, 8);
  at = put_byte(at, 8);
  at = put(at, &compact->handlers, 8);
  const unsigned below = (compact->encoding >> OFFSET_SHIFT) & OFFSET_MASK;
  for (unsigned index = 0; index < SAVED_REGISTERS; index++) {
    const unsigned saved = numbers[(compact->encoding >> (3 * index)) & 7];
    if (saved == 0) continue;
    /* From the frame's address, 16 bytes above %rbp, in words of 8 bytes; two bytes hold up to 2^14 of them. */
    const unsigned words = 2 + below - index;
    at = put_byte(at, DW_CFA_offset | saved);
    at = put_byte(at, (words & 0x7f) | 0x80);
    at = put_byte(at, words >> 7);
  }
  end_record(entry, at, entry + ENTRY_SIZE);
}

bool register_frames(struct image *image) {
  const struct section *section = find_section(image, "__compact_unwind");
  if (section == NULL) return true;
  const struct compact *compact = (const void *)(image->base + section->address);
  const size_t count = section->size / sizeof *compact;
  /* They stay as long as the program; entries count back to what they share in 32 bits. */
  struct common *common = calloc(1, PERSONALITIES * sizeof *common + count * ENTRY_SIZE);
  if (common == NULL) return fail("there is no memory for the object's frames");
  char *entries = (char *)(common + PERSONALITIES);
  unsigned personalities = 0;
  for (size_t index = 0; index < count; index++) {
    /* A frame of another kind stays unknown: an exception through it ends the program, which is seen. */
    if ((compact[index].encoding & MODE_MASK) != RBP_FRAME) continue;
    const struct common *shared = find_common(common, &personalities, compact[index].personality);
    if (shared == NULL) return fail("the object has more than %d personalities", PERSONALITIES);
    write_entry(entries + index * ENTRY_SIZE, &compact[index], shared);
    __register_frame(entries + index * ENTRY_SIZE);
  }
  return true;
}
