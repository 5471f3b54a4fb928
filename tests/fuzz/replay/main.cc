// Runs a fuzz harness without libFuzzer: every seed as it is, cut short at every length, and with
// bytes changed by a fixed random sequence, so that a failure can be repeated.
//
//   fuzz_replays HARNESS SEED_DIRECTORY [COPIES]
//
// COPIES: how often bytes of each seed are changed (2000).

#include "tests/fuzz/replay/replay.h"
#include "tests/std.h"

namespace baton {
namespace {

std::map<std::string, FuzzHarness>& harnesses() {
  static auto* all = new std::map<std::string, FuzzHarness>;
  return *all;
}

using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxCuts = 2000;
constexpr int kDamagedCopies = 2000;

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(in), {});
}

// A heap copy of exactly the right size, so that a sanitizer sees every byte read past its end.
void run(FuzzHarness harness, const Bytes& input, size_t size) {
  const Bytes exact(input.begin(), input.begin() + static_cast<std::ptrdiff_t>(size));
  harness(exact.data(), exact.size());
}

void replay(FuzzHarness harness, const Bytes& seed, int copies) {
  run(harness, seed, seed.size());
  const size_t step = seed.size() / kMaxCuts + 1;
  for (size_t cut = 0; cut < seed.size(); cut += step) run(harness, seed, cut);

  if (seed.empty()) return;
  std::mt19937 random(static_cast<uint32_t>(seed.size()));
  for (int copy = 0; copy < copies; ++copy) {
    Bytes damaged = seed;
    for (uint32_t changes = 1 + random() % 4; changes > 0; --changes) {
      constexpr uint8_t kNasty[] = {0x00, 0x01, 0x7f, 0x80, 0xff, '"', '{', '['};
      const uint8_t value = random() % 2 ? static_cast<uint8_t>(random()) : kNasty[random() % 8];
      damaged[random() % damaged.size()] = value;
    }
    run(harness, damaged, damaged.size());
  }
}

}  // namespace

FuzzReplay::FuzzReplay(const char* name, FuzzHarness harness) { harnesses()[name] = harness; }

}  // namespace baton

int main(int argc, char** argv) {
  using namespace baton;
  const auto harness = argc == 3 || argc == 4 ? harnesses().find(argv[1]) : harnesses().end();
  if (harness == harnesses().end()) {
    std::fprintf(stderr, "usage: %s HARNESS SEED_DIRECTORY [COPIES]; there are:\n", argv[0]);
    for (const auto& [name, unused] : harnesses()) std::fprintf(stderr, "  %s\n", name.c_str());
    return 2;
  }
  std::vector<std::filesystem::path> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(argv[2])) seeds.push_back(entry);
  std::sort(seeds.begin(), seeds.end());
  if (seeds.empty()) {
    std::fprintf(stderr, "no seeds in %s\n", argv[2]);
    return 1;
  }
  const int copies = argc == 4 ? std::atoi(argv[3]) : kDamagedCopies;
  for (const auto& seed : seeds) {
    std::printf("%s\n", seed.c_str());
    std::fflush(stdout);
    replay(harness->second, read_file(seed), copies);
  }
  return 0;
}
