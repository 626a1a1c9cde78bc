// Runs every native operation on odd sizes, off alignment, in and out of place, on one and on several threads, for the
// sanitizers to watch. Ends with 0 when results do not depend on the threads and nothing was found.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "zerostd_native.h"

namespace {

using Bytes = std::vector<unsigned char>;

void expect(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "driver: %s\n", what);
  std::exit(1);
}

Bytes random_bytes(int64_t size, uint32_t seed) {
  Bytes bytes(static_cast<size_t>(size));
  uint16_t pattern[1021];  // repeated: calls that a sanitizer looks into are slow
  std::minstd_rand random(seed);
  for (uint16_t& number : pattern) number = static_cast<uint16_t>(random() >> 8);
  for (size_t at = 0; at < bytes.size(); at += sizeof pattern) {
    std::memcpy(bytes.data() + at, pattern, std::min(sizeof pattern, bytes.size() - at));
  }
  return bytes;
}

int64_t item_size(int32_t dtype) { return dtype == ZS_FLOAT32 ? 4 : 2; }

// The arrays of a step, exactly as long as they need to be, so that a sanitizer sees what is read or written beyond.
struct Arrays {
  Bytes master, low, states[2];

  Arrays(int64_t count, bool split, uint32_t seed)
      : master(random_bytes(count * (split ? 2 : 4), seed)), low(random_bytes(split ? count * 2 : 0, seed + 1)) {
    for (uint32_t s = 0; s < 2; ++s) states[s] = random_bytes(count * 4, seed + 2 + s);
  }

  zs_arrays pointers(bool split) {
    return {master.data(), split ? low.data() : nullptr, {states[0].data(), states[1].data()}};
  }

  bool operator==(const Arrays& other) const {
    return master == other.master && low == other.low && states[0] == other.states[0] && states[1] == other.states[1];
  }
};

void update(int64_t count, int32_t rule, int32_t gradient_dtype, int32_t weight_dtype, bool split) {
  zs_step step{};
  step.rule = rule;
  step.decay = rule == ZS_ADAM ? ZS_DECOUPLED : ZS_COUPLED;
  step.momentum = rule == ZS_SGD ? ZS_CONTINUED : ZS_NO_MOMENTUM;
  step.nesterov = 1;
  step.gradient_dtype = gradient_dtype;
  step.weight_dtype = weight_dtype;
  step.factor = 0.5f;
  step.rate = -0.001f;
  step.decay_factor = step.old_part = 0.9f;
  step.new_part = step.square_part = 0.1f;
  step.correction = 0.5f;
  step.eps = 1e-8f;
  step.count = count;
  Bytes gradient = random_bytes(count * item_size(gradient_dtype), 1);
  Bytes weights[2] = {Bytes(static_cast<size_t>(count * item_size(weight_dtype))), Bytes(weights[0])};
  step.gradient = gradient.data();
  Arrays source(count, split, 5), in_place = source, apart(count, split, 9);
  if (rule != ZS_ADAM) apart.states[1] = source.states[1];
  step.source = source.pointers(split);
  step.target = apart.pointers(split);
  step.weight = split ? nullptr : weights[0].data();
  step.num_threads = 1;
  expect(zs_update(&step) == ZS_OK, "zs_update on one thread");
  step.source = step.target = in_place.pointers(split);
  step.weight = split ? nullptr : weights[1].data();
  step.num_threads = 3;
  expect(zs_update(&step) == ZS_OK, "zs_update on three threads");
  expect(in_place == apart && weights[0] == weights[1], "zs_update depends on the threads or on the place");
  if (split || item_size(gradient_dtype) != item_size(weight_dtype)) return;
  in_place = source;
  step.weight = gradient.data();
  expect(zs_update(&step) == ZS_OK && gradient == weights[0], "zs_update onto the gradient");
}

void sums(int64_t count) {
  for (int32_t from = 0; from < 3; ++from) {
    const Bytes source = random_bytes(count * item_size(from), 1);
    for (int32_t to = 0; to < 3; ++to) {
      Bytes sum(static_cast<size_t>(count / 3 * item_size(to)));
      const int32_t status = zs_sum_slices(source.data(), from, 3, count / 3, 0.5f, sum.data(), to, 0, 3);
      expect(status == ZS_OK, "zs_sum_slices");
    }
  }
}

uint32_t crc32_of(const unsigned char* data, int64_t count, uint32_t before, int32_t is_plain) {
  uint32_t crc = 0;
  expect(zs_crc32(data, count, before, is_plain, &crc) == ZS_OK, "zs_crc32");
  return crc;
}

void checksums(int64_t count) {
  const Bytes bytes = random_bytes(count, 3);
  for (int64_t skipped = 0; skipped < std::min<int64_t>(count, 20); ++skipped) {
    const unsigned char* data = bytes.data() + skipped;
    const int64_t length = count - skipped, half = length / 2;
    const uint32_t plain = crc32_of(data, length, 7, 1);
    expect(plain == crc32_of(data, length, 7, 0), "zs_crc32 depends on the instructions");
    expect(plain == crc32_of(data + half, length - half, crc32_of(data, half, 7, 0), 0), "zs_crc32 in two parts");
  }
  const int64_t page = 64;
  std::vector<uint32_t> crcs(static_cast<size_t>((count + page - 1) / page));
  expect(zs_crc32_pages(bytes.data(), count, page, crcs.data()) == ZS_OK, "zs_crc32_pages");
  for (int64_t start = 0; start < count; start += page) {
    const uint32_t alone = crc32_of(bytes.data() + start, std::min(page, count - start), 0, 1);
    expect(crcs[static_cast<size_t>(start / page)] == alone, "zs_crc32_pages is not zs_crc32 of each page");
  }
}

void all_operations(int64_t count) {
  sums(count);
  checksums(count);
  for (int32_t rule = ZS_ADAM; rule <= ZS_ADAGRAD; ++rule) {
    for (int32_t gradient = 0; gradient < 3; ++gradient) {
      for (int32_t weight = 0; weight < 3; ++weight) update(count, rule, gradient, weight, false);
      update(count, rule, gradient, ZS_FLOAT32, true);
    }
  }
}

}  // namespace

int main() {
  const unsigned char digits[] = "123456789";
  expect(crc32_of(digits, 9, 0, 0) == 0xcbf43926 && crc32_of(digits, 9, 0, 1) == 0xcbf43926, "zs_crc32 is not zlib's");
  for (int64_t count = 0; count < 200; ++count) checksums(count);
  for (int32_t level = zs_limit_instructions(9); level >= 0; --level) {
    expect(zs_limit_instructions(level) == level, "zs_limit_instructions");
    for (int64_t count : {0, 1, 15, 17, 1000, 40003}) all_operations(count);
  }
  zs_limit_instructions(9);
  update((1 << 20) + 100, ZS_ADAM, ZS_BFLOAT16, ZS_BFLOAT16, false);  // long enough to be written around the cache
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back([] { all_operations(40003); });
  for (std::thread& caller : callers) caller.join();
  return 0;
}
