/* The dynamic linker of this program: opens Android's libraries unchanged, and gives them the functions of `imports`.
 *
 * glibc's own linker would want a libc.so with Android's version nodes, and take functions of another ABI where it finds
 * them first. This program is linked statically, so that `dlopen` and its kin here are the only ones, for ONNX Runtime
 * as for edgekit's runner. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include "imports.h"

#if defined(__x86_64__)
enum { MACHINE = EM_X86_64, RELATIVE = R_X86_64_RELATIVE, ABSOLUTE = R_X86_64_64, GLOBAL = R_X86_64_GLOB_DAT,
       JUMP = R_X86_64_JUMP_SLOT };
#elif defined(__aarch64__)
enum { MACHINE = EM_AARCH64, RELATIVE = R_AARCH64_RELATIVE, ABSOLUTE = R_AARCH64_ABS64, GLOBAL = R_AARCH64_GLOB_DAT,
       JUMP = R_AARCH64_JUMP_SLOT };
#endif

enum { MOST_LIBRARIES = 8, MOST_HEADERS = 32, PAGE = 4096 };

struct library {
  char path[PATH_MAX];
  char *base; /* where address 0 of the file lies */
  const Elf64_Phdr *headers;
  unsigned header_count;
  const Elf64_Sym *symbols;
  const char *names;
  const uint32_t *hash;
};

static struct library libraries[MOST_LIBRARIES];
static unsigned library_count;
static char message[PATH_MAX + 512];
static bool has_message;

/* Libraries of the system that have no file here; what is asked of them stands in `imports`. */
static const char *const system_names[] = {"libandroid.so", "libc.so", "libdl.so", "liblog.so", "libm.so"};
static char system_library;

static void *fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  has_message = true;
  return NULL;
}

static int compare_import(const void *name, const void *entry) {
  return strcmp(name, ((const struct import *)entry)->name);
}

static void *find_import(const char *name) {
  const struct import *found = bsearch(name, imports, import_count, sizeof *imports, compare_import);
  return found != NULL ? found->place : NULL;
}

/* Finds what a library exports, by the hash table of its linker (DT_GNU_HASH). */
static void *find_export(const struct library *library, const char *name) {
  const uint32_t buckets = library->hash[0], first = library->hash[1], blooms = library->hash[2];
  const uint32_t *bucket = (const uint32_t *)((const uint64_t *)(library->hash + 4) + blooms);
  const uint32_t *chain = bucket + buckets;
  uint32_t hash = 5381;
  for (const char *letter = name; *letter != '\0'; letter++) hash = hash * 33 + (unsigned char)*letter;
  uint32_t index = bucket[hash % buckets];
  if (index < first) return NULL;
  for (;; index++) {
    const uint32_t entry = chain[index - first];
    const Elf64_Sym *symbol = &library->symbols[index];
    if (((entry ^ hash) >> 1) == 0 && symbol->st_shndx != SHN_UNDEF && !strcmp(library->names + symbol->st_name, name)) {
      return library->base + symbol->st_value;
    }
    if (entry & 1) return NULL;
  }
}

static void *find_in_libraries(const char *name) {
  void *place = find_import(name);
  for (unsigned index = 0; place == NULL && index < library_count; index++) {
    place = find_export(&libraries[index], name);
  }
  return place;
}

static bool read_headers(int file, const char *path, Elf64_Ehdr *head, Elf64_Phdr *headers) {
  if (pread(file, head, sizeof *head, 0) != sizeof *head || memcmp(head->e_ident, ELFMAG, SELFMAG) != 0) {
    return fail("'%s' is no ELF library", path);
  }
  if (head->e_type != ET_DYN || head->e_machine != MACHINE || head->e_phnum > MOST_HEADERS) {
    return fail("'%s' is no library for this machine", path);
  }
  const ssize_t size = head->e_phnum * (ssize_t)sizeof *headers;
  if (pread(file, headers, (size_t)size, (off_t)head->e_phoff) != size) return fail("'%s' is cut off", path);
  return true;
}

static int protection_of(const Elf64_Phdr *header) {
  return (header->p_flags & PF_R ? PROT_READ : 0) | (header->p_flags & PF_W ? PROT_WRITE : 0) |
         (header->p_flags & PF_X ? PROT_EXEC : 0);
}

static size_t page_of(size_t address) { return address & ~(size_t)(PAGE - 1); }
static size_t pages_up(size_t address) { return page_of(address + PAGE - 1); }

/* Maps one segment at its place in what was reserved; what the file does not hold of it is zero. */
static bool map_segment(int file, char *base, const Elf64_Phdr *header) {
  const size_t start = page_of(header->p_vaddr), skew = header->p_vaddr - start;
  const size_t held = header->p_filesz + skew, whole = header->p_memsz + skew;
  const int protection = protection_of(header);
  if (held > 0 && mmap(base + start, held, protection, MAP_PRIVATE | MAP_FIXED, file,
                       (off_t)(header->p_offset - skew)) == MAP_FAILED) {
    return false;
  }
  if (whole > held && (header->p_flags & PF_W)) memset(base + start + held, 0, pages_up(held) - held);
  return pages_up(whole) == pages_up(held) ||
         mmap(base + start + pages_up(held), pages_up(whole) - pages_up(held), protection,
              MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
}

static bool map_library(int file, const char *path, struct library *library) {
  Elf64_Ehdr head;
  Elf64_Phdr headers[MOST_HEADERS];
  if (!read_headers(file, path, &head, headers)) return false;
  const off_t size = lseek(file, 0, SEEK_END);
  size_t end = 0;
  for (unsigned index = 0; index < head.e_phnum; index++) {
    const Elf64_Phdr *header = &headers[index];
    if (header->p_type == PT_TLS) return fail("'%s' has thread variables, which are not supported", path);
    if (header->p_type != PT_LOAD) continue;
    if ((off_t)(header->p_offset + header->p_filesz) > size) return fail("'%s' is cut off", path);
    if (header->p_vaddr + header->p_memsz > end) end = header->p_vaddr + header->p_memsz;
  }
  library->base = mmap(NULL, pages_up(end), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (library->base == MAP_FAILED) return fail("there is no memory for '%s'", path);
  for (unsigned index = 0; index < head.e_phnum; index++) {
    if (headers[index].p_type == PT_LOAD && !map_segment(file, library->base, &headers[index])) {
      return fail("'%s' cannot be mapped", path);
    }
  }
  library->headers = (const Elf64_Phdr *)(library->base + head.e_phoff);
  library->header_count = head.e_phnum;
  return true;
}

struct relocations {
  const Elf64_Rela *first;
  size_t size;
};

struct dynamic {
  struct relocations data, calls;
  void (**start)(int, char **, char **);
  size_t start_size;
};

/* Reads the dynamic section. Android's packed relocations are not known here: ONNX Runtime has plain ones. */
static bool read_dynamic(struct library *library, struct dynamic *dynamic) {
  const Elf64_Dyn *entry = NULL;
  for (unsigned index = 0; index < library->header_count; index++) {
    if (library->headers[index].p_type == PT_DYNAMIC) entry = (void *)(library->base + library->headers[index].p_vaddr);
  }
  for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
    void *place = library->base + entry->d_un.d_ptr;
    switch (entry->d_tag) {
      case DT_SYMTAB: library->symbols = place; break;
      case DT_STRTAB: library->names = place; break;
      case DT_GNU_HASH: library->hash = place; break;
      case DT_RELA: dynamic->data.first = place; break;
      case DT_RELASZ: dynamic->data.size = entry->d_un.d_val; break;
      case DT_JMPREL: dynamic->calls.first = place; break;
      case DT_PLTRELSZ: dynamic->calls.size = entry->d_un.d_val; break;
      case DT_INIT_ARRAY: dynamic->start = place; break;
      case DT_INIT_ARRAYSZ: dynamic->start_size = entry->d_un.d_val; break;
      case DT_RELR:
      case 0x6000000f: /* DT_ANDROID_REL */
      case 0x60000011: /* DT_ANDROID_RELA */
        return fail("'%s' has packed relocations, which are not supported", library->path);
    }
  }
  if (library->symbols == NULL || library->names == NULL || library->hash == NULL) {
    return fail("'%s' has no table of symbols", library->path);
  }
  return true;
}

static bool find_symbol(const struct library *library, uint32_t index, uint64_t *value) {
  const Elf64_Sym *symbol = &library->symbols[index];
  const char *name = library->names + symbol->st_name;
  if (symbol->st_shndx != SHN_UNDEF) {
    *value = (uint64_t)(library->base + symbol->st_value);
    return true;
  }
  *value = (uint64_t)find_in_libraries(name);
  if (*value != 0 || ELF64_ST_BIND(symbol->st_info) == STB_WEAK) return true;
  return fail("'%s' imports %s, which this program lacks", library->path, name);
}

static bool relocate(const struct library *library, const struct relocations *relocations) {
  const Elf64_Rela *end = relocations->first + relocations->size / sizeof *end;
  for (const Elf64_Rela *entry = relocations->first; entry < end; entry++) {
    uint64_t value = (uint64_t)library->base;
    switch (ELF64_R_TYPE(entry->r_info)) {
      case RELATIVE: break;
      case ABSOLUTE:
      case GLOBAL:
      case JUMP:
        if (!find_symbol(library, (uint32_t)ELF64_R_SYM(entry->r_info), &value)) return false;
        break;
      default:
        return fail("'%s' has relocations of kind %u", library->path, (unsigned)ELF64_R_TYPE(entry->r_info));
    }
    *(uint64_t *)(library->base + entry->r_offset) = value + (uint64_t)entry->r_addend;
  }
  return true;
}

static void protect_relocated(const struct library *library) {
  for (unsigned index = 0; index < library->header_count; index++) {
    const Elf64_Phdr *header = &library->headers[index];
    if (header->p_type != PT_GNU_RELRO) continue;
    const size_t start = page_of(header->p_vaddr);
    mprotect(library->base + start, page_of(header->p_vaddr + header->p_memsz) - start, PROT_READ);
  }
}

#if defined(__aarch64__)
/* The word at 40 bytes behind the thread pointer is the stack guard of code for Android on Arm. A thread variable of
 * this alignment moves the first one of this program behind it, as Android's own programs have it. */
static _Thread_local _Alignas(64) volatile char thread_slots_of_bionic[64];
#endif

/* Returns whether no thread variable of this program lies in Android's slots. The one above is written here because a
 * linker that drops what nobody uses, as zig's does, drops the alignment with it; then the stack guard changes while
 * functions run, and they end the process. */
static bool has_thread_slots(void) {
#if defined(__aarch64__)
  thread_slots_of_bionic[0] = 0;
  const Elf64_Phdr *header = (const Elf64_Phdr *)getauxval(AT_PHDR);
  for (unsigned long left = getauxval(AT_PHNUM); left > 0; left--, header++) {
    if (header->p_type == PT_TLS) return header->p_align >= sizeof thread_slots_of_bionic;
  }
#endif
  return true;
}

static struct library *load(const char *path) {
  if (!has_thread_slots()) return fail("this program was linked without Android's thread slots");
  if (library_count == MOST_LIBRARIES) return fail("too many libraries are open");
  struct library *library = &libraries[library_count];
  struct dynamic dynamic = {0};
  memset(library, 0, sizeof *library);
  if (realpath(path, library->path) == NULL) return fail("there is no file '%s'", path);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return fail("'%s' cannot be read", path);
  const bool mapped = map_library(file, path, library);
  close(file);
  if (!mapped || !read_dynamic(library, &dynamic)) return NULL;
  if (!relocate(library, &dynamic.data) || !relocate(library, &dynamic.calls)) return NULL;
  protect_relocated(library);
  library_count++;
  for (size_t index = 0; index < dynamic.start_size / sizeof *dynamic.start; index++) {
    dynamic.start[index](0, NULL, environ);
  }
  return library;
}

/* NNAPI is there where the device was told which feature level it has. */
static bool is_of_system(const char *name) {
  if (!strcmp(name, "libneuralnetworks.so")) return getenv("EDGEKIT_NNAPI_LEVEL") != NULL;
  for (size_t index = 0; index < sizeof system_names / sizeof *system_names; index++) {
    if (!strcmp(name, system_names[index])) return true;
  }
  return false;
}

void *dlopen(const char *path, int flags) {
  (void)flags;
  if (path == NULL || is_of_system(path)) return &system_library;
  char real[PATH_MAX];
  for (unsigned index = 0; index < library_count && realpath(path, real) != NULL; index++) {
    if (!strcmp(libraries[index].path, real)) return &libraries[index];
  }
  return load(path);
}

void *dlsym(void *handle, const char *name) {
  const struct library *library = handle;
  const bool own = library >= libraries && library < libraries + library_count;
  void *place = own ? find_export(library, name) : find_in_libraries(name);
  return place != NULL ? place : fail("there is no %s", name);
}

char *dlerror(void) {
  char *text = has_message ? message : NULL;
  has_message = false;
  return text;
}

int dlclose(void *handle) {
  (void)handle;
  return 0;
}

int dladdr(const void *address, Dl_info *info) {
  for (unsigned index = 0; index < library_count; index++) {
    const struct library *library = &libraries[index];
    for (unsigned at = 0; at < library->header_count; at++) {
      const Elf64_Phdr *header = &library->headers[at];
      const size_t offset = (size_t)((const char *)address - library->base) - header->p_vaddr;
      if (header->p_type != PT_LOAD || offset >= header->p_memsz) continue;
      *info = (Dl_info){.dli_fname = library->path, .dli_fbase = library->base};
      return 1;
    }
  }
  return 0;
}

/* What unwinders ask for the tables of exceptions: this program first, then its libraries. */
int dl_iterate_phdr(int (*visit)(struct dl_phdr_info *, size_t, void *), void *data) {
  struct dl_phdr_info info = {.dlpi_name = "",
                              .dlpi_phdr = (const Elf64_Phdr *)getauxval(AT_PHDR),
                              .dlpi_phnum = (Elf64_Half)getauxval(AT_PHNUM),
                              .dlpi_adds = library_count + 1};
  int result = visit(&info, sizeof info, data);
  for (unsigned index = 0; result == 0 && index < library_count; index++) {
    info.dlpi_addr = (Elf64_Addr)libraries[index].base;
    info.dlpi_name = libraries[index].path;
    info.dlpi_phdr = libraries[index].headers;
    info.dlpi_phnum = (Elf64_Half)libraries[index].header_count;
    result = visit(&info, sizeof info, data);
  }
  return result;
}
