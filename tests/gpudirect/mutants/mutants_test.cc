// The code with one mistake in it, made between it and the driver: somebody notices, be it by an
// error, by bytes that are wrong, or because the fake reports a rule that was broken.
//
// Here the first and the last chance of each mistake; BATON_CASES=all is every one.
#include "tests/gpudirect/mutants/flows.h"
#include "tests/gpudirect/mutants/mutator.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::gpudirect {
namespace {

constexpr uint64_t kSeeds = 24;  // orders in which streams run: a mistake may be seen in some only

struct Outcome {
  bool made = false;
  bool caught = false;
  std::string by;  // the class of the rule, or what else noticed
};

Outcome run(const Flow& flow, const Mutant& mutant, uint64_t seed) {
  FakeDriver fake({.seed = seed, .attributes = flow.attributes()});
  const Driver below = FakeDriver::driver();
  absl::Status status;
  Outcome out;
  {
    const Mutator mutator(below, mutant);
    status = flow.run(fake, mutator.table());
    out.made = mutator.made();
  }
  const std::vector<std::string> violations = fake.finish();
  out.caught = !status.ok() || !violations.empty();
  if (!violations.empty()) {
    const std::string& first = violations.front();
    out.by = first.substr(first.rfind('[') + 1, first.size() - first.rfind('[') - 2);
  } else {
    out.by = absl::IsDataLoss(status) ? "wrong bytes" : "an error";
  }
  return out;
}

// In a process of its own, which a mistake may crash, or hang for ever.
Outcome run_apart(const Flow& flow, const Mutant& mutant) {
  int ends[2];
  if (pipe(ends) != 0) return {};
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    Outcome outcome;
    bool any = false;
    for (uint64_t seed = 1; seed <= kSeeds && !outcome.caught; ++seed) {
      try {
        outcome = run(flow, mutant, seed);
      } catch (const std::exception&) {
        _exit(1);
      }
      any |= outcome.made;
    }
    const std::string said = std::string(any ? "m" : "-") + (outcome.caught ? outcome.by : "");
    _exit(write(ends[1], said.data(), said.size()) > 0 ? 0 : 1);
  }
  close(ends[1]);
  char said[64] = {};
  const ssize_t size = read(ends[0], said, sizeof said - 1);
  close(ends[0]);
  int how = 0;
  waitpid(child, &how, 0);
  if (size <= 0)
    return {true, true, WIFSIGNALED(how) && WTERMSIG(how) == SIGALRM ? "a hang" : "a crash"};
  return {said[0] == 'm', size > 1, said + 1};
}

// Promise(devices): Mistakes in how the driver is called are noticed without a GPU | 764 of 789
//   mutants are found by the fake's rules
TEST(Mutants, AreNoticed) {
  const char* const cases = std::getenv("BATON_CASES");
  const bool all = cases != nullptr && std::string(cases) == "all";
  // Each is a process, and a sanitizer has nothing to say of a mistake that is made on purpose: it
  // sees one of so many.
  const size_t every = kSanitized && !all ? 6 : 1;
  size_t turn = 0, made = 0;
  std::map<std::string, size_t> noticed;
  std::vector<std::string> missed;
  std::set<std::string> calls;
  for (const Flow& flow : flows()) {
    std::vector<Chance> chances;
    {
      FakeDriver fake({.attributes = flow.attributes()});
      const Driver below = FakeDriver::driver();
      const Mutator mutator(below);
      ASSERT_TRUE(flow.run(fake, mutator.table()).ok()) << flow.name;
      chances = mutator.chances();
    }
    for (const Chance& chance : chances) {
      for (int n = 1; n <= chance.times; ++n) {
        if (!all && n != 1 && n != chance.times) continue;
        if (turn++ % every != 0) continue;
        const Mutant mutant{chance.call, chance.mistake, n};
        const Outcome outcome = run_apart(flow, mutant);
        if (!outcome.made) continue;
        ++made;
        calls.insert(chance.call);
        if (outcome.caught) {
          ++noticed[outcome.by];
        } else {
          missed.push_back(std::string(flow.name) + ": " + mutant.text());
        }
      }
    }
  }
  std::printf("%zu mutants of %zu calls, %zu missed\n", made, calls.size(), missed.size());
  for (const auto& [by, count] : noticed) std::printf("  %zu by %s\n", count, by.c_str());
  for (const std::string& one : missed) std::printf("  missed: %s\n", one.c_str());
  EXPECT_GT(made, 300u / every);
  EXPECT_GE((made - missed.size()) * 100, made * 95);
}

}  // namespace
}  // namespace baton::gpudirect
