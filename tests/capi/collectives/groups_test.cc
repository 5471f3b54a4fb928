// Groups in C, of calls and of ranks; and what they leave in the process.
#include "tests/capi/collectives/ranks.h"

namespace baton::capi {
namespace {

// Promise(collectives): A program in C waits for several calls as one | as
//   Communicator::group_begin(), with the numbers and errors of the library
TEST_P(CollectivesInC, AGroupOfCallsIsOneWork) {
  run_ranks(
      3,
      [](Rank& self) {
        baton_error& error = self.error;
        const int32_t right = (self.rank + 1) % 3, left = (self.rank + 2) % 3;
        const std::vector<int32_t> mine(1000, self.rank);
        std::vector<int32_t> theirs(1000, -1);
        baton_work group = 0, joined = 0, receiving = 0;
        ASSERT_EQ(baton_comm_group_begin(self.comm, &group, &error), BATON_OK) << error.text;
        ASSERT_NE(group, 0u);
        baton_call send = call_of(BATON_SEND, mine.data(), nullptr, 1000, right);
        baton_call receive = call_of(BATON_RECEIVE, nullptr, theirs.data(), 1000, BATON_ANY_RANK);
        send.group = receive.group = group;
        const baton_work sending = self.start(send);
        receiving = self.start(receive);
        EXPECT_EQ(baton_work_test(self.comm, group, &error), BATON_ERR_NOT_ALLOWED) << error.text;
        // As another communicator of this process numbers it.
        send.group = group + (uint64_t{1} << 44);
        baton_stream stream = {0, nullptr};
        EXPECT_EQ(baton_comm_start(self.comm, &send, &joined, &error), BATON_ERR_INVALID_PARAM);
        EXPECT_EQ(baton_comm_group_end(self.comm, send.group, &error), BATON_ERR_INVALID_PARAM);
        EXPECT_EQ(baton_work_hold(self.comm, send.group, &stream, &error), BATON_ERR_NOT_FOUND);
        ASSERT_EQ(baton_comm_group_end(self.comm, group, &error), BATON_OK) << error.text;
        EXPECT_EQ(baton_work_wait(self.comm, group, kLong, &error), BATON_OK) << error.text;
        EXPECT_EQ(theirs, std::vector<int32_t>(1000, left));
        int32_t source = -1;
        EXPECT_EQ(baton_work_source(self.comm, receiving, &source, &error), BATON_OK) << error.text;
        EXPECT_EQ(source, left);
        EXPECT_EQ(baton_work_wait(self.comm, sending, kLong, &error), BATON_ERR_NOT_FOUND);
        // What makes no sense, and breaks nothing.
        send.group = group + 1000;
        for (const int32_t bad : {baton_comm_start(self.comm, &send, &joined, &error),
                                  baton_comm_group_end(self.comm, group, &error),
                                  baton_comm_group_end(self.comm, 0, &error),
                                  baton_comm_group_begin(self.comm, nullptr, &error),
                                  baton_comm_group_begin(nullptr, &group, &error),
                                  baton_work_hold(self.comm, group, nullptr, &error)}) {
          EXPECT_EQ(bad, BATON_ERR_INVALID_PARAM) << error.text;
        }
        EXPECT_LT(baton_work_hold(self.comm, group, &stream, &error), 0);
        EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK) << error.text;
      },
      GetParam());
}

// --- groups from handles ---

struct Member {
  ~Member() {
    baton_comm_destroy(comm);
    baton_endpoint_close(endpoint);
  }
  baton_endpoint* endpoint = nullptr;
  baton_comm* comm = nullptr;
  baton_error error = BATON_ERROR_INIT;
};

baton_comm_options group(uint64_t uuid) {
  baton_comm_options options;
  baton_comm_options_init(&options, sizeof options);
  options.uuid = uuid;
  return options;
}

// body(member, its rank, all handles) on a thread for each, once it has a communicator of all.
void run_members(int members, uint64_t uuid,
                 const std::function<void(Member&, int, const std::vector<baton_handle>&)>& body) {
  std::vector<Member> all(static_cast<size_t>(members));
  std::vector<baton_handle> handles(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(baton_endpoint_open(nullptr, &all[i].endpoint, &all[i].error), BATON_OK)
        << all[i].error.text;
    ASSERT_EQ(baton_endpoint_handle(all[i].endpoint, &handles[i], &all[i].error), BATON_OK);
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < members; ++i) {
    threads.emplace_back([&, i] {
      Member& self = all[static_cast<size_t>(i)];
      const baton_comm_options options = group(uuid);
      ASSERT_EQ(baton_comm_create(self.endpoint, handles.data(), handles.size(), &options,
                                  &self.comm, &self.error),
                BATON_OK)
          << self.error.text;
      body(self, i, handles);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Promise(collectives): A loop may sleep on an endpoint's event descriptor | peers begin later
TEST(GroupsOfC, ALoopSleepsOnTheEventDescriptor) {
  std::atomic<int> asleep{0};
  run_members(2, 23, [&](Member& self, int rank, const std::vector<baton_handle>&) {
    for (int turn = 1; turn <= 20; ++turn) {
      std::vector<int32_t> data(turn % 2 != 0 ? 16 : 300'000, rank + 1);
      const baton_call call = call_of(BATON_ALL_REDUCE, data.data(), data.data(), data.size());
      baton_work work = 0;
      if (rank == 1) until([&] { return asleep == turn; });
      ASSERT_EQ(baton_comm_start(self.comm, &call, &work, &self.error), BATON_OK)
          << self.error.text;
      if (rank == 1) {
        ASSERT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_OK)
            << self.error.text;
        continue;
      }
      pollfd fd{.fd = baton_endpoint_event_fd(self.endpoint), .events = POLLIN, .revents = 0};
      int32_t result = BATON_IN_PROGRESS;
      while ((result = baton_work_test(self.comm, work, &self.error)) == BATON_IN_PROGRESS) {
        if (baton_endpoint_progress(self.endpoint) == 1) continue;
        asleep = turn;
        ASSERT_EQ(poll(&fd, 1, static_cast<int>(kLong / 1'000'000)), 1) << "turn " << turn;
      }
      ASSERT_EQ(result, BATON_OK) << self.error.text;
      EXPECT_EQ(data.back(), 3);
    }
  });
}

TEST(GroupsOfC, HandlesAndMemoryThatMakeNoSenseAreRefused) {
  Member self;
  ASSERT_EQ(baton_endpoint_open(nullptr, &self.endpoint, &self.error), BATON_OK) << self.error.text;
  baton_handle own{}, damaged{};
  ASSERT_EQ(baton_endpoint_handle(self.endpoint, &own, &self.error), BATON_OK);
  damaged = own;
  damaged.bytes[50] ^= 1;
  const struct {
    const char* what;
    std::vector<baton_handle> handles;
    uint64_t uuid;
  } cases[] = {{"damaged", {own, damaged}, 1},
               {"zeros", {own, baton_handle{}}, 1},
               {"none", {}, 1},
               {"one twice", {own, own}, 1},
               {"no uuid", {own}, 0}};
  const baton_comm_options alone = group(5);
  baton_comm* first = nullptr;
  ASSERT_EQ(baton_comm_create(self.endpoint, &own, 1, &alone, &first, &self.error), BATON_OK)
      << self.error.text;
  EXPECT_EQ(baton_comm_create(self.endpoint, &own, 1, &alone, &self.comm, &self.error),
            BATON_ERR_NOT_ALLOWED)
      << self.error.text;
  baton_comm_destroy(first);
  for (const auto& each : cases) {
    const baton_comm_options options = group(each.uuid);
    EXPECT_LT(baton_comm_create(self.endpoint, each.handles.data(), each.handles.size(), &options,
                                &self.comm, &self.error),
              0)
        << each.what;
    EXPECT_EQ(self.comm, nullptr) << each.what;
    EXPECT_NE(*self.error.text, 0) << each.what;
  }
  void* memory = nullptr;
  EXPECT_EQ(baton_endpoint_allocate(self.endpoint, 0, &memory, &self.error),
            BATON_ERR_INVALID_PARAM);
  ASSERT_EQ(baton_endpoint_allocate(self.endpoint, 4096, &memory, &self.error), BATON_OK);
  EXPECT_EQ(baton_endpoint_free(self.endpoint, static_cast<char*>(memory) + 1, &self.error),
            BATON_ERR_NOT_FOUND);
  EXPECT_EQ(baton_endpoint_free(self.endpoint, memory, &self.error), BATON_OK);
  EXPECT_EQ(baton_endpoint_free(self.endpoint, memory, &self.error), BATON_ERR_NOT_FOUND);
}

// --- the process ---

size_t entries(const char* folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

size_t shared_mappings() {
  size_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:") != std::string::npos ? 1 : 0;
  }
  return count;
}

// Promise(collectives): Communicators of C leave no descriptor, thread or shared memory behind |
//   they are counted before and after 100
TEST(CollectivesOfC, LeaveNothingBehind) {
  const auto once = [] {
    run_ranks(2, [](Rank& self) {
      EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK) << self.error.text;
    });
  };
  once();  // what the process makes once
  const size_t descriptors = entries("/proc/self/fd"), shared = shared_mappings();
  size_t threads = 0;
  until([&, last = entries("/proc/self/task")]() mutable {
    threads = entries("/proc/self/task");
    return std::exchange(last, threads) == threads;
  });
  for (int i = 0; i < 50; ++i) once();  // of two ranks
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(shared_mappings(), shared);
  until([&] { return entries("/proc/self/task") <= threads; });  // who was joined is listed longer
}

}  // namespace
}  // namespace baton::capi
