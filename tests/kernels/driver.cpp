// Runs every native operation on odd sizes, off alignment, in and out of place, on one and on several threads, for the
// sanitizers to watch. Ends with 0 when results do not depend on the threads and nothing was found.
//
//   driver              a fixed list of sizes and options
//   driver SECONDS SEED drawn sizes and options, some of them wrong, from three threads at once; prints how many
#include <algorithm>
#include <atomic>
#include <chrono>
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

  Arrays(int64_t count, bool split, uint32_t seed, int32_t codec = ZS_NO_CODEC)
      : master(random_bytes(count * (split ? 2 : 4), seed)), low(random_bytes(split ? count * 2 : 0, seed + 1)) {
    const int64_t records = (count + ZS_CODED_BLOCK - 1) / ZS_CODED_BLOCK;
    const int64_t size = codec == ZS_INT8 ? records * (ZS_CODED_BLOCK + 4) : count * (codec == ZS_BF16 ? 2 : 4);
    for (uint32_t s = 0; s < 2; ++s) states[s] = random_bytes(size, seed + 2 + s);
  }

  zs_arrays pointers(bool split) {
    return {master.data(), split ? low.data() : nullptr, {states[0].data(), states[1].data()}};
  }

  bool operator==(const Arrays& other) const {
    return master == other.master && low == other.low && states[0] == other.states[0] && states[1] == other.states[1];
  }
};

void update(int64_t count, int32_t rule, int32_t gradient_dtype, int32_t weight_dtype, bool split,
            int32_t codec = ZS_NO_CODEC) {
  zs_step step{};
  step.codec = codec;
  step.key = 12345;
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
  Arrays source(count, split, 5, codec), in_place = source, apart(count, split, 9, codec);
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

void codes(int64_t count) {
  count -= count % ZS_CODED_BLOCK;
  for (int32_t dtype = 0; dtype < 3; ++dtype) {
    const Bytes source = random_bytes(2 * count * item_size(dtype), 5);
    for (int32_t bits : {8, 4}) {
      const int64_t size = count * bits / 8 + count / ZS_CODED_BLOCK * 4;
      Bytes coded[2] = {Bytes(static_cast<size_t>(2 * size)), Bytes(static_cast<size_t>(2 * size))};
      Bytes decoded[2] = {Bytes(static_cast<size_t>(count * 4)), Bytes(static_cast<size_t>(count * 4))};
      for (int32_t threads : {1, 3}) {
        const int32_t place = threads / 3;
        for (int64_t slice = 0; slice < 2; ++slice) {
          const unsigned char* values = source.data() + slice * count * item_size(dtype);
          expect(zs_encode_blocks(values, dtype, count, bits, coded[place].data() + slice * size, threads) == ZS_OK,
                 "zs_encode_blocks");
        }
        expect(zs_decode_blocks(coded[place].data(), 2, count, bits, 0.5f, decoded[place].data(), ZS_FLOAT32, 0,
                                threads) == ZS_OK, "zs_decode_blocks");
      }
      expect(coded[0] == coded[1] && decoded[0] == decoded[1], "codes depend on the threads");
    }
  }
  unsigned char nothing[8];
  expect(zs_encode_blocks(nothing, 0, 1, 8, nothing, 1) == ZS_BAD_ARGUMENT, "zs_encode_blocks of a part of a block");
  expect(zs_decode_blocks(nothing, 1, 0, 5, 1.0f, nothing, 0, 0, 1) == ZS_BAD_ARGUMENT, "zs_decode_blocks of 5 bits");
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

void planes(int64_t count) {
  for (int32_t item : {2, 4}) {
    const Bytes values = random_bytes(count * item, 4);
    Bytes bytes[4];
    void* pointers[4];
    for (int32_t plane = 0; plane < item; ++plane) {
      bytes[plane].resize(static_cast<size_t>(count));
      pointers[plane] = bytes[plane].data();
    }
    Bytes joined(values.size());
    expect(zs_split_planes(values.data(), count, item, pointers) == ZS_OK, "zs_split_planes");
    expect(zs_join_planes(pointers, count, item, joined.data()) == ZS_OK, "zs_join_planes");
    expect(values == joined, "zs_join_planes does not give back what zs_split_planes took");
    expect(zs_split_planes(values.data(), count, item + 1, pointers) == ZS_BAD_ARGUMENT, "an item of odd size");
    expect(zs_join_planes(pointers, -1, item, joined.data()) == ZS_BAD_ARGUMENT, "a negative count");
  }
}

void all_operations(int64_t count) {
  sums(count);
  checksums(count);
  planes(count);
  for (int32_t rule = ZS_ADAM; rule <= ZS_ADAGRAD; ++rule) {
    for (int32_t gradient = 0; gradient < 3; ++gradient) {
      for (int32_t weight = 0; weight < 3; ++weight) update(count, rule, gradient, weight, false);
      update(count, rule, gradient, ZS_FLOAT32, true);
      if (rule != ZS_ADAM) continue;
      for (int32_t codec : {ZS_INT8, ZS_BF16}) {
        for (int32_t weight = 0; weight < 3; ++weight) update(count, rule, gradient, weight, false, codec);
        update(count, rule, gradient, ZS_FLOAT32, true, codec);
      }
    }
  }
}

// -- drawn from a seed --

using Random = std::minstd_rand;

int32_t draw(Random& random, int32_t most) {
  return static_cast<int32_t>((random() >> 4) % static_cast<uint32_t>(most + 1));
}

// Sizes of all orders of magnitude; one in sixteen is negative.
int64_t draw_count(Random& random) {
  const int64_t count = draw(random, (1 << draw(random, 16)) - 1);
  return draw(random, 15) ? count : -1 - count;
}

// One of 0 to `most`; now and then one that is not among them.
int32_t draw_name(Random& random, int32_t most) {
  return draw(random, 31) ? draw(random, most) : draw(random, 99) - 50;
}

bool is_in(int32_t value, int32_t most) { return value >= 0 && value <= most; }

void drawn_update(Random& random) {
  const int64_t count = draw_count(random), size = std::max<int64_t>(0, count);
  const bool split = draw(random, 3) == 0;
  const int32_t codec = draw(random, 1) ? ZS_NO_CODEC : draw_name(random, ZS_BF16);
  zs_step step{};
  step.codec = codec;
  step.key = static_cast<uint32_t>(random());
  step.rule = draw_name(random, ZS_ADAGRAD);
  step.decay = draw_name(random, ZS_DECOUPLED);
  step.momentum = step.rule == ZS_SGD ? draw_name(random, ZS_CONTINUED) : 0;
  step.maximize = draw(random, 1);
  step.nesterov = draw(random, 1);
  step.gradient_dtype = draw_name(random, 2);
  step.weight_dtype = draw_name(random, 2);
  step.num_threads = draw(random, 31) ? 1 + draw(random, 4) : -draw(random, 1);
  float* const numbers[] = {&step.factor, &step.rate, &step.decay_factor, &step.new_part, &step.old_part,
                            &step.square_part, &step.correction, &step.eps};
  for (float* number : numbers) {
    const uint32_t bits = static_cast<uint32_t>(random());  // of any number, also NaN and infinity
    if (draw(random, 7)) *number = static_cast<float>(draw(random, 2000) - 1000) / 1000.0f;
    else std::memcpy(number, &bits, sizeof bits);
  }
  step.count = count;
  const Bytes gradient = random_bytes(size * 4, random());
  Bytes weights[2] = {Bytes(static_cast<size_t>(size * 4)), Bytes(static_cast<size_t>(size * 4))};
  Arrays source(size, split, random(), codec), in_place = source, apart = source;
  const Arrays before = source;
  step.gradient = gradient.data();
  const bool is_known = is_in(codec, ZS_BF16) && is_in(step.rule, codec ? ZS_ADAM : ZS_ADAGRAD) && is_in(step.decay, step.rule == ZS_ADAM ? 2 : 1) &&
                        is_in(step.momentum, 2) && is_in(step.gradient_dtype, 2) && is_in(step.weight_dtype, 2) &&
                        count >= 0 && step.num_threads >= 1;
  const int32_t status = is_known ? ZS_OK : ZS_BAD_ARGUMENT;
  step.source = step.target = in_place.pointers(split);
  step.weight = split ? nullptr : weights[0].data();
  expect(zs_update(&step) == status, "zs_update of drawn options");
  if (is_known) step.num_threads = 1;
  step.source = source.pointers(split);
  step.target = apart.pointers(split);
  step.weight = split ? nullptr : weights[1].data();
  expect(zs_update(&step) == status, "zs_update of drawn options, apart");
  expect(source == before, "zs_update has changed its source");
  expect(in_place == apart && weights[0] == weights[1], "zs_update depends on the threads or on the place");
  expect(is_known || in_place == before, "zs_update has changed what it refused");
}

void drawn_sum(Random& random) {
  const int64_t count = draw_count(random), size = std::max<int64_t>(0, count);
  const int32_t from = draw_name(random, 2), to = draw_name(random, 2), accumulate = draw(random, 3) == 0;
  const int64_t num_slices = draw(random, 31) ? 1 + draw(random, 4) : -draw(random, 1);
  const int32_t num_threads = draw(random, 31) ? 1 + draw(random, 4) : -draw(random, 1);
  const Bytes source = random_bytes(size * 4 * std::max<int64_t>(0, num_slices), random());
  Bytes sums[2] = {random_bytes(size * 4, 3), random_bytes(size * 4, 3)};
  const bool is_known = is_in(from, 2) && is_in(to, 2) && num_slices >= 1 && count >= 0 && num_threads >= 1 &&
                        !(accumulate && to != ZS_FLOAT32);
  for (int32_t place = 0; place < 2; ++place) {
    const int32_t threads = place && is_known ? 1 : num_threads;
    const int32_t status =
        zs_sum_slices(source.data(), from, num_slices, count, 0.5f, sums[place].data(), to, accumulate, threads);
    expect(status == (is_known ? ZS_OK : ZS_BAD_ARGUMENT), "zs_sum_slices of drawn options");
  }
  expect(sums[0] == sums[1], "zs_sum_slices depends on the threads");
}

void drawn_checksum(Random& random) {
  const int64_t count = draw_count(random);
  uint32_t crc = 0;
  if (count >= 0) checksums(std::min<int64_t>(count, 5000));
  else expect(zs_crc32(&crc, count, 0, 0, &crc) == ZS_BAD_ARGUMENT, "zs_crc32 of drawn options");
}

int fuzz(double seconds, uint32_t seed) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::atomic<int64_t> num_examples{0};
  zs_limit_instructions(static_cast<int32_t>(seed % 3));  // as far as the processor has them
  std::vector<std::thread> callers;
  for (uint32_t caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      Random random(1 + 3 * seed + caller);
      for (; Clock::now() < end; ++num_examples) {
        const int32_t operation = draw(random, 7);
        operation == 0 ? drawn_checksum(random) : operation < 3 ? drawn_sum(random) : drawn_update(random);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  std::printf("%lld\n", static_cast<long long>(num_examples));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) return fuzz(std::atof(argv[1]), static_cast<uint32_t>(std::atoi(argv[2])));
  const unsigned char digits[] = "123456789";
  expect(crc32_of(digits, 9, 0, 0) == 0xcbf43926 && crc32_of(digits, 9, 0, 1) == 0xcbf43926, "zs_crc32 is not zlib's");
  for (int64_t count = 0; count < 200; ++count) checksums(count);
  for (int64_t count : {0, 64, 640, 100000}) codes(count);
  for (int32_t level = zs_limit_instructions(9); level >= 0; --level) {
    expect(zs_limit_instructions(level) == level, "zs_limit_instructions");
    for (int64_t count : {0, 1, 15, 17, 1000, 40003}) all_operations(count);
  }
  zs_limit_instructions(9);
  for (int32_t codec : {ZS_NO_CODEC, ZS_INT8, ZS_BF16}) {  // long enough to be written around the cache
    update((1 << 20) + 100, ZS_ADAM, ZS_BFLOAT16, ZS_BFLOAT16, false, codec);
  }
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back([] { all_operations(40003); });
  for (std::thread& caller : callers) caller.join();
  return 0;
}
