// What a stranger does who has the public headers and nothing else: too much of everything, in
// processes with too little of everything. Each call ends, and says why where it could not.
#include <exception>
#include <new>

#include "kvtransfer/agent.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/usable_provider.h"

namespace baton::kvtransfer {
namespace {

const Time kStrangersPatience = until_gives_up();

// How a process of its own ends that runs `what`: 0 where that returned true. One that hangs is
// killed by SIGALRM.
int outcome_of(const std::function<bool()>& what) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(what() && !testing::Test::HasFailure() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

void limit(int what, rlim_t most) {
  const rlimit limits{most, most};
  setrlimit(static_cast<__rlimit_resource>(what), &limits);
}

size_t address_space() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// A container in a thread of the library's own has nobody to tell, and ends the program.
[[noreturn]] void end_without_memory() {
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const std::bad_alloc&) {
    _exit(0);
  } catch (...) {
    std::abort();
  }
}

// Two agents meet and move something both ways; whatever they cannot do they say.
absl::Status meet_and_move(const std::string& provider) {
  const auto options = [&](const char* name) {
    AgentOptions out = agent_options(name, provider);
    if (provider == "tcp") out.worker.settings = {{"tcp.handshake_ms", "500"}};
    return out;
  };
  auto a = Agent::create(options("a"));
  if (!a.ok()) return a.status();
  auto b = Agent::create(options("b"));
  if (!b.ok()) return b.status();
  std::vector<uint8_t> here(300'000, 1), there(300'000, 2);
  const Descriptor mine{reinterpret_cast<uint64_t>(here.data()), here.size(), 0};
  const Descriptor theirs{reinterpret_cast<uint64_t>(there.data()), there.size(), 0};
  if (absl::Status status = (*a)->register_memory({{mine}}); !status.ok()) return status;
  if (absl::Status status = (*b)->register_memory({{theirs}}); !status.ok()) return status;
  const auto metadata = (*b)->metadata();
  if (!metadata.ok()) return metadata.status();
  if (const auto name = (*a)->add_remote(*metadata); !name.ok()) return name.status();
  const auto id = (*a)->make_transfer(Op::kWrite, {{mine}}, {{theirs}}, "b", "done");
  if (!id.ok()) return id.status();
  if (absl::Status status = (*a)->post(*id); !status.ok()) return status;
  if (absl::Status status = (*a)->wait(*id, kStrangersPatience); !status.ok()) return status;
  return here == there ? absl::OkStatus() : absl::DataLossError("done, and not there");
}

bool is_clear(const absl::Status& status) {
  if (status.ok()) return true;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return !status.message().empty() && !absl::IsDataLoss(status) &&
         !absl::IsDeadlineExceeded(status);
}

class Stranger : public OverEveryProvider<std::string> {};

constexpr const char* kOwnNeeds = "a sanitizer needs descriptors and address space of its own";

// Promise(agents): A process short of descriptors, threads or memory gets errors, no hangs | a
//   thread without a bell polls every 10 ms
TEST_P(Stranger, WithFewDescriptorsIsToldSo) {
  if (kSanitized) GTEST_SKIP() << kOwnNeeds;
  bool worked = false;
  for (rlim_t most = 4; most < 100; most += 3) {
    SCOPED_TRACE(most);
    const int status = outcome_of([&] {
      limit(RLIMIT_NOFILE, most);
      const absl::Status moved = meet_and_move(provider());
      if (moved.ok()) _exit(77);
      return is_clear(moved);
    });
    worked = WIFEXITED(status) && WEXITSTATUS(status) == 77;
    ASSERT_TRUE(worked || status == 0) << status;
    if (worked) break;
  }
  EXPECT_TRUE(worked);
}

TEST_P(Stranger, WithLittleMemoryIsToldSo) {
  if (kSanitized) GTEST_SKIP() << kOwnNeeds;
  bool worked = false;
  for (size_t mib = 0; mib < 2000; mib += mib < 24 ? 2 : 24) {
    SCOPED_TRACE(mib);
    const int status = outcome_of([&] {
      limit(RLIMIT_AS, address_space() + (mib << 20));
      std::set_terminate(end_without_memory);
      absl::Status moved;
      try {
        moved = meet_and_move(provider());
      } catch (const std::bad_alloc&) {  // of a container of the library's, in this call
        return true;
      }
      if (moved.ok()) _exit(77);
      return is_clear(moved);
    });
    worked = WIFEXITED(status) && WEXITSTATUS(status) == 77;
    EXPECT_TRUE(worked || status == 0) << mib << " MiB: " << status;
    if (worked) break;
  }
  EXPECT_TRUE(worked);
}

// Regions, lists, transfers that run at once, messages: one agent takes 10,000 of each. Of regions
// it takes 65,536, and says what to do instead.
// Promise(agents): Ten thousand lists, transfers and messages at once arrive, or the call says that
//   there are too many | transfers beyond the worker's slots wait in the agent
TEST_P(Stranger, TakesTenThousandOfEverything) {
  const auto many = static_cast<size_t>(rounds_of(10'000, 5'000));
  const auto a = make_agent(agent_options("a", provider()));
  const auto b = make_agent(agent_options("b", provider()));
  AgentMemory here(*a, many * 64, 1), there(*b, many * 64, 2);
  const std::vector<Descriptor> mine = here.pages(64, many), theirs = there.pages(64, many);
  const absl::Status each = a->register_memory(mine);
  EXPECT_TRUE(each.ok()) << each;
  EXPECT_EQ(a->stats().registered, many + 1);
  if (!kSanitized) {  // it takes minutes then
    const absl::Status too_many = a->register_memory(std::vector<Descriptor>(65'536, mine[0]));
    EXPECT_TRUE(absl::IsResourceExhausted(too_many)) << too_many;
    EXPECT_THAT(std::string(too_many.message()), testing::HasSubstr("register large ranges once"));
    EXPECT_EQ(a->stats().registered, many + 1);  // all or none
  }
  introduce(*a, *b);
  const auto all = a->prepare_remote("b", theirs).value();
  std::vector<AgentListId> lists;
  std::vector<AgentTransferId> ids;
  for (size_t i = 0; i < many; ++i) {
    const auto list = a->prepare_local({{mine[i]}}).value();
    lists.push_back(list);
    const auto id =
        a->make_transfer(Op::kWrite, list, {0}, all, {static_cast<int64_t>(i)}, std::to_string(i))
            .value();
    ids.push_back(id);
  }
  for (const AgentTransferId id : ids) {
    const absl::Status posted = a->post(id);
    ASSERT_TRUE(posted.ok()) << posted;
  }
  const Time end = Clock::steady().now() + kStrangersPatience;
  for (size_t sent = 0; sent < many;) {
    const absl::Status status = a->notify("b", "word");
    sent += status.ok() ? 1 : 0;
    if (status.ok()) continue;
    ASSERT_TRUE(absl::IsResourceExhausted(status)) << status;  // too many at once: a little later
    ASSERT_LT(Clock::steady().now(), end);
    std::this_thread::yield();
  }
  for (const AgentTransferId id : ids) {
    const absl::Status done = a->wait(id, kStrangersPatience);
    ASSERT_TRUE(done.ok()) << done;
  }
  EXPECT_EQ(here.bytes, there.bytes);
  size_t heard = 0;
  until([&] { return (heard += b->messages().size()) >= 2 * many; });
  EXPECT_EQ(heard, 2 * many);
  for (const AgentTransferId id : ids) EXPECT_TRUE(a->release(id, kStrangersPatience).ok());
  lists.push_back(all);
  for (const AgentListId id : lists) EXPECT_TRUE(a->release_list(id).ok());
  EXPECT_EQ(a->stats().transfers + a->stats().lists, 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, Stranger, testing::Values("shm", "tcp"),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace baton::kvtransfer
