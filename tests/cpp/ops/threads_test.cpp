#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace zorro {
namespace {

// Without -fopenmp on the compile line parallel_for is silently serial.
TEST(Threads, ParallelForRunsOnTwo) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  at::parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    const std::scoped_lock lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  at::set_num_threads(before);
  EXPECT_EQ(ids.size(), 2U);
}

// Two OpenMP run-times in one process would each start their own threads.
TEST(Threads, OneOpenMpRuntimeIsMapped) {
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> libraries;
  for (std::string line; std::getline(maps, line);) {
    for (const char* name : {"libgomp", "libomp", "libiomp"})
      if (line.find(name) != std::string::npos) libraries.insert(line.substr(line.find('/')));
  }
  EXPECT_EQ(libraries.size(), 1U);
}

}  // namespace
}  // namespace zorro
