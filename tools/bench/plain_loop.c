/* The least a program can do with ONNX Runtime: open a model and run it N times on one float input.
 *
 *   plain_loop LIBRARY MODEL INPUT.raw RUNS DIM...
 *
 * It prints one line of JSON: the milliseconds of loading and the median, least and first of the runs. The functions
 * are found by their place in the library's table, as in tools/runner/src/ort.h.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef void* Handle;
typedef Handle (*Function)();

static void** table;

static double now_ms(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

static void check(Handle status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\n", ((const char* (*)(Handle))table[2])(status));
  exit(1);
}

static int compare(const void* first, const void* second) {
  const double a = *(const double*)first, b = *(const double*)second;
  return (a > b) - (a < b);
}

int main(int count, char** words) {
  if (count < 6) return 2;
  const size_t rank = (size_t)count - 5, runs = (size_t)atol(words[4]);
  int64_t shape[16];
  size_t elements = 1;
  for (size_t axis = 0; axis < rank && axis < 16; ++axis) elements *= (size_t)(shape[axis] = atoll(words[5 + axis]));
  float* input = malloc(elements * sizeof *input);
  FILE* file = fopen(words[3], "rb");
  if (file == NULL || fread(input, sizeof *input, elements, file) != elements) return 2;
  fclose(file);

  void* library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return 2;
  void** base = ((void** (*)(void))dlsym(library, "OrtGetApiBase"))();
  table = ((void** (*)(uint32_t))base[0])(17);
  Handle env, options, session, memory, allocator, value;
  char *input_name, *output_name;
  check(((Handle (*)(int32_t, const char*, Handle*))table[3])(3, "plain", &env));
  check(((Handle (*)(Handle*))table[10])(&options));
  check(((Handle (*)(Handle, int))table[24])(options, 1));
  const double start = now_ms();
  check(((Handle (*)(Handle, const char*, Handle, Handle*))table[7])(env, words[2], options, &session));
  const double load_ms = now_ms() - start;
  check(((Handle (*)(Handle*))table[78])(&allocator));
  check(((Handle (*)(Handle, size_t, Handle, char**))table[36])(session, 0, allocator, &input_name));
  check(((Handle (*)(Handle, size_t, Handle, char**))table[37])(session, 0, allocator, &output_name));
  check(((Handle (*)(int32_t, int32_t, Handle*))table[69])(1, 0, &memory));
  check(((Handle (*)(Handle, void*, size_t, const int64_t*, size_t, int32_t, Handle*))table[49])(
      memory, input, elements * sizeof *input, shape, rank, 1, &value));

  double* times = malloc(runs * sizeof *times);
  for (size_t run = 0; run < runs; ++run) {
    Handle output = NULL;
    const double begin = now_ms();
    check(((Handle (*)(Handle, Handle, const char* const*, const Handle*, size_t, const char* const*, size_t,
                       Handle*))table[9])(session, NULL, (const char* const*)&input_name, &value, 1,
                                          (const char* const*)&output_name, 1, &output));
    times[run] = now_ms() - begin;
    ((void (*)(Handle))table[96])(output);
  }
  const double first_ms = times[0];
  qsort(times, runs, sizeof *times, compare);
  printf("{\"load_ms\":%.4f,\"median_ms\":%.6f,\"least_ms\":%.6f,\"first_ms\":%.4f}\n", load_ms, times[runs / 2],
         times[0], first_ms);
  return 0;
}
