// Environments of launchers, made up.
#include "collectives/launch/environment.h"

#include "absl/strings/str_split.h"
#include "tests/fails_with.h"
#include "tests/test.h"

namespace baton::launch {
namespace {

using Variables = std::map<std::string, std::string>;

absl::StatusOr<std::optional<Place>> place_of(const Variables& variables, uid_t user = 1000,
                                              pid_t parent = 1) {
  return place_in({.variable =
                       [&](const char* name) {
                         const auto found = variables.find(name);
                         return found == variables.end() ? nullptr : found->second.c_str();
                       },
                   .user = user,
                   .parent = parent});
}

Place found(const Variables& variables, uid_t user = 1000, pid_t parent = 1) {
  const auto place = place_of(variables, user, parent);
  EXPECT_TRUE(place.ok()) << place.status();
  EXPECT_TRUE(place.ok() && place->has_value());
  return place.ok() ? place->value_or(Place{}) : Place{};
}

void expect_refused(const Variables& variables, const std::string& names) {
  const auto place = place_of(variables);
  EXPECT_THAT(place.status(), fails_with(Code::kInvalidArgument, {names}));
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "732495873"}};
const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29500"}};
const Variables kPmi = {
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

void expect_place(const Place& place, int rank, int ranks, int local_rank, int local_ranks) {
  EXPECT_EQ(rank, place.rank);
  EXPECT_EQ(ranks, place.ranks);
  EXPECT_EQ(local_rank, place.local_rank);
  EXPECT_EQ(local_ranks, place.local_ranks);
}

TEST(Environment, NoLauncher) {
  for (const Variables& variables :
       {Variables{}, Variables{{"BATON_RENDEZVOUS", "a:1"}},
        Variables{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}}) {  // the last: a batch script
    const auto place = place_of(variables);
    ASSERT_TRUE(place.ok()) << place.status();
    EXPECT_FALSE(place->has_value());
  }
}

// Two launchers that say different things of one process: both are named.
TEST(Environment, Contradictions) {
  const Variables pod = {{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  const Variables slurm = {{"SLURM_PROCID", "1"},
                           {"SLURM_NTASKS", "2"},
                           {"SLURM_STEP_ID", "0"},
                           {"SLURM_STEP_TASKS_PER_NODE", "2"}};
  const Variables one = {{"BATON_RANK", "0"}, {"BATON_RANKS", "1"}};
  for (const Variables& said : {pod, one, with(pod, {{"TORCHELASTIC_RUN_ID", "x"}})}) {
    for (const auto& [launcher, name] : {std::pair(kOpenMpi, "OMPI_COMM_WORLD_"),
                                         std::pair(kPmi, "PMI_"), std::pair(slurm, "SLURM_")}) {
      const bool slurms = launcher.contains("SLURM_PROCID");
      const Variables both = with(said, launcher);
      expect_refused(both,
                     said.contains("RANK") ? "RANK=0 WORLD_SIZE=1" : "BATON_RANK=0 BATON_RANKS=1");
      expect_refused(both, slurms ? "SLURM_PROCID=1 SLURM_NTASKS=2"
                                  : absl::StrCat(name, "RANK=1 ", name, "SIZE=2"));
      expect_refused(both, "contradict each other");
    }
  }
  expect_refused(with(kOpenMpi, {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}), "PMI_RANK=0 PMI_SIZE=2");
  const Variables hand = {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}};
  expect_refused(with(with(slurm, hand), {{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "SLURM_PROCID=1");

  // What is no contradiction: the same said twice, and a launcher below another one.
  const Variables same = with(hand, {{"RANK", "1"}, {"WORLD_SIZE", "2"}});
  for (const Variables& launcher : {kOpenMpi, kPmi, slurm}) {
    EXPECT_EQ(found(with(launcher, same)).launcher, "torchrun");
  }
  const Variables torchrun = with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "x"}});
  EXPECT_EQ(found(with(slurm, torchrun)).rank, 5);
  EXPECT_EQ(found(with(kOpenMpi, torchrun)).rank, 5);
  const Variables daemon = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_STEP_ID", "0"}};
  EXPECT_EQ(found(with(kOpenMpi, daemon)).rank, 1);
  EXPECT_EQ(found(with(with(kOpenMpi, daemon), {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}})).rank, 1);
  EXPECT_EQ(found({{"BATON_RANK", "0"},
                   {"BATON_RANKS", "2"},
                   {"BATON_RENDEZVOUS", "h:1"},
                   {"OMPI_COMM_WORLD_RANK", "2"},
                   {"OMPI_COMM_WORLD_SIZE", "4"}})
                .ranks,
            2);
}

TEST(Environment, HalfOfAPairIsAnError) {
  for (const char* alone : {"RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK",
                            "OMPI_COMM_WORLD_SIZE", "BATON_RANK", "BATON_RANKS"}) {
    expect_refused({{alone, "1"}}, std::string(alone) + "=1");
    expect_refused({{alone, "1"}}, "is not set");
  }
  // A launcher that says both is believed.
  EXPECT_EQ(found(with(kOpenMpi, {{"WORLD_SIZE", "1"}})).ranks, 2);
}

TEST(Environment, Baton) {
  const Variables variables = {
      {"BATON_RANK", "0"}, {"BATON_RANKS", "4"}, {"BATON_RENDEZVOUS", "h:1"}, {"RANK", "x"}};
  const Place place = found(variables);
  expect_place(place, 0, 4, 0, 4);
  EXPECT_EQ("h:1", place.rendezvous);
  EXPECT_EQ("baton", place.launcher);
  EXPECT_TRUE(place.serves);
  const Place third = found(with(
      variables, {{"BATON_RANK", "3"}, {"BATON_LOCAL_RANK", "1"}, {"BATON_LOCAL_RANKS", "2"}}));
  expect_place(third, 3, 4, 1, 2);
  EXPECT_FALSE(third.serves);

  expect_refused(with(variables, {{"BATON_RANK", "4"}}), "BATON_RANK=\"4\"");
  expect_refused(with(variables, {{"BATON_RANK", "-1"}}), "BATON_RANK");
  expect_refused(with(variables, {{"BATON_RANKS", "many"}}), "BATON_RANKS=\"many\"");
  expect_refused({{"BATON_RANK", "0"}}, "BATON_RANKS");
  expect_refused({{"BATON_RANK", "0"}, {"BATON_RANKS", "2"}}, "BATON_RENDEZVOUS=HOST:PORT");
}

TEST(Environment, Torchrun) {
  const Place place = found(kTorchrun);
  expect_place(place, 5, 8, 1, 4);
  EXPECT_EQ("10.0.0.1:29500", place.rendezvous);
  EXPECT_EQ("torchrun", place.launcher);
  EXPECT_FALSE(place.serves);
  EXPECT_TRUE(found(with(kTorchrun, {{"RANK", "0"}})).serves);
  EXPECT_EQ("10.0.0.1:29501",
            found(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).rendezvous);
  EXPECT_EQ("[fe80::1]:29500", found(with(kTorchrun, {{"MASTER_ADDR", "fe80::1"}})).rendezvous);
  EXPECT_EQ("b:2", found(with(kTorchrun, {{"BATON_RENDEZVOUS", "b:2"}})).rendezvous);
  expect_refused(with(kTorchrun, {{"MASTER_ADDR", ""}}), "MASTER_ADDR");
  expect_refused(with(kTorchrun, {{"MASTER_PORT", "0"}}), "MASTER_PORT");
  expect_refused(with(kTorchrun, {{"LOCAL_RANK", "4"}}), "LOCAL_RANK");
  // Numbered by hand on one machine: each takes a device of its own.
  const Variables by_hand = {
      {"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29500"}};
  expect_place(found(by_hand), 3, 4, 3, 4);
  expect_place(found(with(by_hand, {{"MASTER_ADDR", "10.0.0.1"}})), 3, 4, 0, 1);
}

TEST(Environment, OpenMpi) {
  const Place place = found(kOpenMpi);
  expect_place(place, 1, 2, 1, 2);
  EXPECT_EQ("mpirun", place.launcher);
  EXPECT_THAT(place.rendezvous, testing::StartsWith("127.0.0.1:"));
  // The same at all ranks of a job, and others for other jobs and users.
  const Place first =
      found(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
            1000, 2);
  EXPECT_EQ(place.rendezvous, first.rendezvous);
  EXPECT_TRUE(first.serves);
  EXPECT_NE(place.rendezvous, found(with(kOpenMpi, {{"PMIX_NAMESPACE", "7"}})).rendezvous);
  EXPECT_NE(place.rendezvous, found(kOpenMpi, 1001).rendezvous);

  const Variables two_hosts =
      with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  expect_refused(two_hosts, "BATON_RENDEZVOUS=HOST:PORT");
  EXPECT_EQ("h:9", found(with(two_hosts, {{"BATON_RENDEZVOUS", "h:9"}})).rendezvous);
  EXPECT_THAT(found(with(two_hosts, {{"SLURM_JOB_NODELIST", "a[7-9]"}})).rendezvous,
              testing::StartsWith("a7:"));
  // Under Slurm mpirun runs on the first node, and its daemon on the second in a step of its own.
  const Variables job = {{"SLURM_JOB_NODELIST", "a[7-8]"}, {"SLURM_JOB_ID", "5"}};
  const Place there = found(with(with(two_hosts, job), {{"SLURM_STEP_NODELIST", "a8"},
                                                        {"SLURM_STEP_ID", "0"},
                                                        {"SLURM_PROCID", "0"},
                                                        {"SLURM_NTASKS", "1"},
                                                        {"PMI_RANK", "0"},
                                                        {"PMI_SIZE", "1"}}));
  const Place here = found(with(with(two_hosts, job), {{"OMPI_COMM_WORLD_RANK", "0"}}));
  EXPECT_TRUE(here.serves);
  EXPECT_EQ(there.rank, 1);
  EXPECT_EQ(there.rendezvous, here.rendezvous);
}

TEST(Environment, Pmi) {
  const Place place = found(with(kPmi, {{"PMI_RANK", "0"}, {"MPI_LOCALRANKID", "0"}}), 1000, 55);
  expect_place(place, 0, 2, 0, 2);
  EXPECT_TRUE(place.serves);
  EXPECT_EQ(place.rendezvous, found(kPmi, 1000, 55).rendezvous);
  EXPECT_NE(place.rendezvous, found(kPmi, 1000, 56).rendezvous);
  expect_refused({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}, "PMI_RANK");
}

// The launcher's side of PMI-1, for ranks on threads: a store of keys, and a barrier.
class Hydra {
 public:
  explicit Hydra(int ranks) : ends_(static_cast<size_t>(ranks)) {
    for (auto& pair : ends_) EXPECT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()));
    for (int rank = 0; rank < ranks; ++rank) {
      threads_.emplace_back([this, rank] { serve(ends_[static_cast<size_t>(rank)][0]); });
    }
  }
  ~Hydra() {
    for (auto& pair : ends_) close(pair[1]);
    for (std::thread& thread : threads_) thread.join();
    for (auto& pair : ends_) close(pair[0]);
  }
  std::string fd(int rank) const { return std::to_string(ends_[static_cast<size_t>(rank)][1]); }
  int finalized() const { return finalized_; }

 private:
  void serve(int fd) {
    std::string read;
    char bytes[512];
    for (ssize_t n; (n = ::read(fd, bytes, sizeof bytes)) > 0;) {
      read.append(bytes, static_cast<size_t>(n));
      for (size_t end; (end = read.find('\n')) != std::string::npos; read.erase(0, end + 1)) {
        const std::string answer = this->answer(read.substr(0, end));
        EXPECT_EQ(static_cast<ssize_t>(answer.size()), write(fd, answer.data(), answer.size()));
      }
    }
  }
  std::string answer(const std::string& line) {
    std::map<std::string, std::string> words;
    for (const std::string& word : std::vector<std::string>(absl::StrSplit(line, ' '))) {
      const size_t sign = word.find('=');
      words[word.substr(0, sign)] = word.substr(sign + 1);
    }
    std::unique_lock lock(mutex_);
    const std::string command = words["cmd"];
    if (command == "init") return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n";
    if (command == "get_my_kvsname") return "cmd=my_kvsname kvsname=kvs_7_0\n";
    if (command == "put") {
      store_[words["key"]] = words["value"];
      return "cmd=put_result rc=0 msg=success\n";
    }
    if (command == "get")
      return "cmd=get_result rc=0 msg=success value=" + store_[words["key"]] + "\n";
    if (command == "finalize") {
      ++finalized_;
      return "cmd=finalize_ack\n";
    }
    EXPECT_EQ(command, "barrier_in");
    ++waiting_;
    all_.notify_all();
    all_.wait(lock, [&] { return waiting_ == threads_.size(); });
    return "cmd=barrier_out\n";
  }

  std::vector<std::array<int, 2>> ends_;
  std::mutex mutex_;
  std::condition_variable all_;
  std::map<std::string, std::string> store_;
  size_t waiting_ = 0;
  std::atomic<int> finalized_ = 0;
  std::vector<std::thread> threads_;
};

// mpiexec of MPICH or Intel MPI, by ssh: nothing says where rank 0 runs, nor who is on which host.
TEST(Environment, RanksOfPmiTellEachOtherWhereTheyAre) {
  constexpr int kRanks = 3;
  Hydra hydra(kRanks);
  std::vector<Place> places(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      // The parent is another one: proxies on several hosts.
      places[static_cast<size_t>(rank)] =
          found({{"PMI_RANK", std::to_string(rank)}, {"PMI_SIZE", "3"}, {"PMI_FD", hydra.fd(rank)}},
                1000, 50 + rank);
    });
  }
  for (std::thread& thread : ranks) thread.join();
  for (int rank = 0; rank < kRanks; ++rank) {
    const Place& place = places[static_cast<size_t>(rank)];
    expect_place(place, rank, kRanks, rank, kRanks);  // in truth they are on one
    EXPECT_EQ(place.serves, rank == 0);
    EXPECT_EQ(place.rendezvous, places[0].rendezvous);
    EXPECT_THAT(place.rendezvous, testing::StartsWith("127.0.0.1:"));
  }
  EXPECT_EQ(hydra.finalized(), kRanks);  // else the launcher kills those who are left

  // Other hosts get the addresses of rank 0's.
  Hydra two(2);
  std::thread other([&] {
    const auto told = tell_by_pmi(std::stoi(two.fd(0)), 0, 2, "elsewhere|10.1.2.3,[fd00::1]",
                                  patient(std::chrono::minutes(1)));
    EXPECT_TRUE(told.ok()) << told.status();
  });
  const Place far = found({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_FD", two.fd(1)}});
  other.join();
  expect_place(far, 1, 2, 0, 1);
  EXPECT_THAT(far.rendezvous, testing::MatchesRegex("10.1.2.3:[0-9]+,\\[fd00::1\\]:[0-9]+"));

  // What is no launcher's descriptor says what to do instead.
  int pair[2];
  ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
  close(pair[0]);
  const auto nobody =
      place_of({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"PMI_FD", std::to_string(pair[1])}});
  EXPECT_THAT(nobody.status(), fails_with(Code::kUnavailable, {"BATON_RENDEZVOUS=HOST:PORT"}));
  close(pair[1]);
}

// What srun leaves out follows from the list of nodes, so that ranks do not share a device.
TEST(Environment, SlurmsLocalRanksComeFromItsNodes) {
  const Variables step = {
      {"SLURM_NTASKS", "5"}, {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_NODELIST", "n[1-3]"}};
  const struct {
    Variables more;
    std::vector<int> local;  // of each rank
  } cases[] = {
      {{{"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"}}, {0, 1, 0, 1, 0}},
      {{{"SLURM_TASKS_PER_NODE", "1,4"}}, {0, 0, 1, 2, 3}},
      {{{"SLURM_NNODES", "2"}}, {0, 1, 2, 0, 1}},
      {{{"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_NNODES", "3"}}, {0, 1, 2, 3, 4}},
  };
  for (const auto& [more, local] : cases) {
    for (int rank = 0; rank < 5; ++rank) {
      const std::string number = std::to_string(rank);
      const Variables task = with(with(step, more), {{"SLURM_PROCID", number}});
      EXPECT_EQ(found(task).local_rank, local[static_cast<size_t>(rank)]) << rank;
      // `srun --mpi=pmi2` says rank and size in PMI's names as well, and nothing of the node.
      const Place pmi2 =
          found(with(task, {{"PMI_RANK", number}, {"PMI_SIZE", "5"}, {"PMI_FD", "9"}}));
      EXPECT_EQ(pmi2.local_rank, local[static_cast<size_t>(rank)]) << rank;
      EXPECT_EQ(pmi2.rendezvous, found(task).rendezvous);
    }
  }
}

TEST(Environment, Slurm) {
  const Variables variables = {{"SLURM_PROCID", "4"},
                               {"SLURM_NTASKS", "5"},
                               {"SLURM_LOCALID", "0"},
                               {"SLURM_NODEID", "2"},
                               {"SLURM_STEP_ID", "0"},
                               {"SLURM_JOB_ID", "99"},
                               {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
                               {"SLURM_JOB_NODELIST", "node[03-05,9]"}};
  const Place place = found(variables);
  expect_place(place, 4, 5, 0, 1);
  EXPECT_EQ("srun", place.launcher);
  EXPECT_THAT(place.rendezvous, testing::StartsWith("node03:"));
  EXPECT_FALSE(place.serves);
  const Place first = found(with(variables, {{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}}));
  expect_place(first, 0, 5, 0, 2);
  EXPECT_TRUE(first.serves);
  EXPECT_EQ(place.rendezvous, first.rendezvous);

  const Variables one_host =
      with(variables, {{"SLURM_NODEID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "5"}});
  EXPECT_THAT(found(one_host).rendezvous, testing::StartsWith("127.0.0.1:"));
  EXPECT_EQ("", found(with(one_host, {{"SLURM_PROCID", "0"},
                                      {"SLURM_NTASKS", "1"},
                                      {"SLURM_STEP_TASKS_PER_NODE", "1"}}))
                    .rendezvous);
  expect_refused(with(variables, {{"SLURM_JOB_NODELIST", "node[03-"}}), "SLURM_JOB_NODELIST");
  expect_refused(with(variables, {{"SLURM_STEP_TASKS_PER_NODE", "2"}}),
                 "SLURM_STEP_TASKS_PER_NODE");
  expect_refused(with(variables, {{"SLURM_NTASKS", "0"}}), "SLURM_NTASKS");
}

TEST(Environment, FirstHostOfANodeList) {
  const std::map<std::string, std::string> lists = {
      {"node7", "node7"},
      {"node7,other8", "node7"},
      {"node[03-05,9]", "node03"},
      {"node[9]", "node9"},
      {"node[1,3],gpu[2-4]", "node1"},
      {"rack[1-2]-gpu[07,9],x", "rack1-gpu07"},
      {"n[001-128].cluster.local,x", "n001.cluster.local"},
  };
  for (const auto& [list, host] : lists) {
    const auto first = first_host(list);
    ASSERT_TRUE(first.ok()) << list << ": " << first.status();
    EXPECT_EQ(host, *first) << list;
  }
  for (const char* bad : {"", ",a", "node[", "node[]", "node[3", "node[,4]"}) {
    EXPECT_FALSE(first_host(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace baton::launch
