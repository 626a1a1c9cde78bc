// A shim between a process and the C library (LD_PRELOAD): reads, writes, syncs and opens of files under a directory
// fail, fall short, change a byte or take long. The variable IO_SHIM, or io_shim_set() at any time, has the rule:
//
//   under=/path,verb=read,action=fail,errno=5,first=3,count=2
//
// under   directory of the files; those without a name count by the directory they were made in; "socket:" for sockets
// verb    read, write, sync, open or send
// action  fail (with errno), short (half of the bytes, at least one page less), flip (a bit of the byte in the middle,
//         in what is read or on its way to the file), delay (by errno milliseconds), hold (until another rule is set)
// first   number of the first call that the rule takes, from 1 on
// count   how many calls it takes; 0: all from there on
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static struct {
  char under[1024], verb[16], action[16];
  int error;
  long first, count;
} rule;
static long calls, taken;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void parse(const char* text) {
  char copy[2048];
  memset(&rule, 0, sizeof rule);
  calls = taken = 0;
  rule.first = 1;
  if (!text) return;
  snprintf(copy, sizeof copy, "%s", text);
  char* rest = copy;
  for (char* item; (item = strsep(&rest, ",")) != NULL;) {
    char* value = strchr(item, '=');
    if (!value) continue;
    *value++ = 0;
    if (!strcmp(item, "under")) snprintf(rule.under, sizeof rule.under, "%s", value);
    if (!strcmp(item, "verb")) snprintf(rule.verb, sizeof rule.verb, "%s", value);
    if (!strcmp(item, "action")) snprintf(rule.action, sizeof rule.action, "%s", value);
    if (!strcmp(item, "errno")) rule.error = atoi(value);
    if (!strcmp(item, "first")) rule.first = atol(value);
    if (!strcmp(item, "count")) rule.count = atol(value);
  }
}

__attribute__((constructor)) static void begin(void) { parse(getenv("IO_SHIM")); }

void io_shim_set(const char* text) {
  pthread_mutex_lock(&lock);
  parse(text);
  pthread_mutex_unlock(&lock);
}

// How many calls the rule has taken.
long io_shim_taken(void) { return taken; }

// Whether this call on a path is one of the rule's.
static int takes(const char* verb, const char* path) {
  int is_taken = 0;
  pthread_mutex_lock(&lock);
  if (*rule.under && !strcmp(verb, rule.verb) && !strncmp(path, rule.under, strlen(rule.under))) {
    calls += 1;
    is_taken = calls >= rule.first && (!rule.count || calls < rule.first + rule.count);
    taken += is_taken;
  }
  pthread_mutex_unlock(&lock);
  return is_taken;
}

static int takes_file(const char* verb, int fd) {
  char link[64], path[1024];
  if (!*rule.under || strcmp(verb, rule.verb)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return takes(verb, path);
}

static int is(const char* action) { return !strcmp(rule.action, action); }

static void delay(void) {
  const struct timespec pause = {rule.error / 1000, rule.error % 1000 * 1000000L};
  nanosleep(&pause, NULL);
}

static void hold(void) {
  const struct timespec pause = {0, 1000000L};
  for (int is_held = 1; is_held;) {
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&lock);
    is_held = is("hold");
    pthread_mutex_unlock(&lock);
  }
}

// The calls of the C library. All reads and writes of Python come with one buffer.
typedef ssize_t vector_call(int, const struct iovec*, int, off_t, int);
typedef ssize_t plain_call(int, void*, size_t, off_t);

static void* next(const char* name) { return dlsym(RTLD_NEXT, name); }

static ssize_t move(const char* verb, plain_call* call, int fd, void* data, size_t count, off_t offset) {
  if (!takes_file(verb, fd)) return call(fd, data, count, offset);
  if (is("fail")) {
    errno = rule.error;
    return -1;
  }
  if (is("delay")) delay();
  if (is("hold")) hold();
  if (is("short") && count > 4096) count = (count / 2 + 4095) / 4096 * 4096 == count ? count - 4096 : count / 2;
  if (!is("flip")) return call(fd, data, count, offset);
  if (!strcmp(verb, "write")) {
    char* copy = aligned_alloc(4096, (count + 4095) / 4096 * 4096);
    memcpy(copy, data, count);
    copy[count / 2] ^= 4;
    const ssize_t done = call(fd, copy, count, offset);
    free(copy);
    return done;
  }
  const ssize_t done = call(fd, data, count, offset);
  if (done > 0) ((char*)data)[done / 2] ^= 4;
  return done;
}

ssize_t pread64(int fd, void* data, size_t count, off_t offset) {
  return move("read", (plain_call*)next("pread64"), fd, data, count, offset);
}
ssize_t pread(int fd, void* data, size_t count, off_t offset) { return pread64(fd, data, count, offset); }

ssize_t pwrite64(int fd, const void* data, size_t count, off_t offset) {
  return move("write", (plain_call*)next("pwrite64"), fd, (void*)data, count, offset);
}
ssize_t pwrite(int fd, const void* data, size_t count, off_t offset) { return pwrite64(fd, data, count, offset); }

ssize_t preadv64v2(int fd, const struct iovec* parts, int num_parts, off_t offset, int flags) {
  if (num_parts == 1 && !flags) return pread64(fd, parts->iov_base, parts->iov_len, offset);
  return ((vector_call*)next("preadv64v2"))(fd, parts, num_parts, offset, flags);
}
ssize_t preadv2(int fd, const struct iovec* parts, int num_parts, off_t offset, int flags) {
  return preadv64v2(fd, parts, num_parts, offset, flags);
}
ssize_t preadv64(int fd, const struct iovec* parts, int num_parts, off_t offset) {
  return preadv64v2(fd, parts, num_parts, offset, 0);
}
ssize_t preadv(int fd, const struct iovec* parts, int num_parts, off_t offset) {
  return preadv64v2(fd, parts, num_parts, offset, 0);
}

ssize_t pwritev64v2(int fd, const struct iovec* parts, int num_parts, off_t offset, int flags) {
  if (num_parts == 1 && !flags) return pwrite64(fd, parts->iov_base, parts->iov_len, offset);
  return ((vector_call*)next("pwritev64v2"))(fd, parts, num_parts, offset, flags);
}
ssize_t pwritev2(int fd, const struct iovec* parts, int num_parts, off_t offset, int flags) {
  return pwritev64v2(fd, parts, num_parts, offset, flags);
}
ssize_t pwritev64(int fd, const struct iovec* parts, int num_parts, off_t offset) {
  return pwritev64v2(fd, parts, num_parts, offset, 0);
}
ssize_t pwritev(int fd, const struct iovec* parts, int num_parts, off_t offset) {
  return pwritev64v2(fd, parts, num_parts, offset, 0);
}

int fsync(int fd) {
  if (takes_file("sync", fd)) {
    if (is("fail")) {
      errno = rule.error;
      return -1;
    }
    delay();
  }
  return ((int (*)(int))next("fsync"))(fd);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = va_arg(arguments, mode_t);
  va_end(arguments);
  if (takes("open", path) && is("fail")) {
    errno = rule.error;
    return -1;
  }
  return ((int (*)(const char*, int, ...))next("open64"))(path, flags, mode);
}

// Sends are late or fail; what is on its way is never changed.
static int is_sent(int fd) {
  if (!takes_file("send", fd)) return 1;
  if (is("delay")) delay();
  if (!is("fail")) return 1;
  errno = rule.error;
  return 0;
}

ssize_t send(int fd, const void* data, size_t count, int flags) {
  return is_sent(fd) ? ((ssize_t(*)(int, const void*, size_t, int))next("send"))(fd, data, count, flags) : -1;
}

ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  return is_sent(fd) ? ((ssize_t(*)(int, const struct msghdr*, int))next("sendmsg"))(fd, message, flags) : -1;
}

ssize_t writev(int fd, const struct iovec* parts, int num_parts) {
  return is_sent(fd) ? ((ssize_t(*)(int, const struct iovec*, int))next("writev"))(fd, parts, num_parts) : -1;
}
