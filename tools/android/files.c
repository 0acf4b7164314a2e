/* Files as Android's C library has them: the three standard streams are objects of a known size in `__sF`, to which its
 * programs point. And files of the phone: an emulated CPU must not be described by this machine's /proc and /sys. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

enum { STREAM_SIZE = 152 };

char bionic___sF[3][STREAM_SIZE];

static FILE *stream_of(void *file) {
  if (file == bionic___sF[0]) return stdin;
  if (file == bionic___sF[1]) return stdout;
  return file == bionic___sF[2] ? stderr : file;
}

int bionic_fclose(void *file) { return fclose(stream_of(file)); }
int bionic_fflush(void *file) { return fflush(file != NULL ? stream_of(file) : NULL); }
int bionic_fileno(void *file) { return fileno(stream_of(file)); }
int bionic_fputc(int letter, void *file) { return fputc(letter, stream_of(file)); }
int bionic_putc(int letter, void *file) { return fputc(letter, stream_of(file)); }
int bionic_fputs(const char *text, void *file) { return fputs(text, stream_of(file)); }
wint_t bionic_fputwc(wchar_t letter, void *file) { return fputwc(letter, stream_of(file)); }
int bionic_fseek(void *file, long offset, int from) { return fseek(stream_of(file), offset, from); }
int bionic_fseeko(void *file, off_t offset, int from) { return fseeko(stream_of(file), offset, from); }
off_t bionic_ftello(void *file) { return ftello(stream_of(file)); }
int bionic_getc(void *file) { return fgetc(stream_of(file)); }
wint_t bionic_getwc(void *file) { return fgetwc(stream_of(file)); }
int bionic_ungetc(int letter, void *file) { return ungetc(letter, stream_of(file)); }
wint_t bionic_ungetwc(wint_t letter, void *file) { return ungetwc(letter, stream_of(file)); }

size_t bionic_fread(void *to, size_t size, size_t count, void *file) { return fread(to, size, count, stream_of(file)); }

size_t bionic_fwrite(const void *from, size_t size, size_t count, void *file) {
  return fwrite(from, size, count, stream_of(file));
}

int bionic_vfprintf(void *file, const char *format, va_list arguments) {
  return vfprintf(stream_of(file), format, arguments);
}

int bionic_fprintf(void *file, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int result = vfprintf(stream_of(file), format, arguments);
  va_end(arguments);
  return result;
}

/* Returns where a file lies that describes the CPU: below $EDGEKIT_PHONE where that is set, written into `place`. */
static const char *phone_path(const char *path, char *place) {
  static const char *const described[] = {"/proc/cpuinfo", "/sys/devices/"};
  const char *root = getenv("EDGEKIT_PHONE");
  for (size_t index = 0; root != NULL && index < sizeof described / sizeof *described; index++) {
    if (strncmp(path, described[index], strlen(described[index])) != 0) continue;
    snprintf(place, PATH_MAX, "%s%s", root, path);
    return place;
  }
  return path;
}

int bionic_open(const char *path, int flags, ...) {
  char place[PATH_MAX];
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return open(phone_path(path, place), flags, mode);
}

int bionic___open_2(const char *path, int flags) { return bionic_open(path, flags); }

void *bionic_fopen(const char *path, const char *mode) {
  char place[PATH_MAX];
  return fopen(phone_path(path, place), mode);
}

DIR *bionic_opendir(const char *path) {
  char place[PATH_MAX];
  return opendir(phone_path(path, place));
}

int bionic_access(const char *path, int mode) {
  char place[PATH_MAX];
  return access(phone_path(path, place), mode);
}

int bionic_stat(const char *path, struct stat *facts) {
  char place[PATH_MAX];
  return stat(phone_path(path, place), facts);
}
