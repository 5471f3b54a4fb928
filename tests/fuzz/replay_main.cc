// Runs a fuzz harness without libFuzzer: every seed as it is, cut short at every length, and with
// bytes changed by a fixed random sequence, so that a failure can be repeated.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxCuts = 2000;
constexpr int kDamagedCopies = 2000;

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(in), {});
}

// A heap copy of exactly the right size, so that a sanitizer sees every byte read past its end.
void run(const Bytes& input, size_t size) {
  const Bytes exact(input.begin(), input.begin() + static_cast<std::ptrdiff_t>(size));
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

void replay(const Bytes& seed) {
  run(seed, seed.size());
  const size_t step = seed.size() / kMaxCuts + 1;
  for (size_t cut = 0; cut < seed.size(); cut += step) run(seed, cut);

  if (seed.empty()) return;
  std::mt19937 random(static_cast<uint32_t>(seed.size()));
  for (int copy = 0; copy < kDamagedCopies; ++copy) {
    Bytes damaged = seed;
    for (uint32_t changes = 1 + random() % 4; changes > 0; --changes) {
      constexpr uint8_t kNasty[] = {0x00, 0x01, 0x7f, 0x80, 0xff, '"', '{', '['};
      const uint8_t value = random() % 2 ? static_cast<uint8_t>(random()) : kNasty[random() % 8];
      damaged[random() % damaged.size()] = value;
    }
    run(damaged, damaged.size());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s SEED_DIRECTORY\n", argv[0]);
    return 2;
  }
  std::vector<std::filesystem::path> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) seeds.push_back(entry);
  std::sort(seeds.begin(), seeds.end());
  if (seeds.empty()) {
    std::fprintf(stderr, "no seeds in %s\n", argv[1]);
    return 1;
  }
  for (const auto& seed : seeds) {
    std::printf("%s\n", seed.c_str());
    std::fflush(stdout);
    replay(read_file(seed));
  }
  return 0;
}
