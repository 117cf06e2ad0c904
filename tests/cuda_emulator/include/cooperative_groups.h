// The cluster of cooperative_groups.
#pragma once
#include "cuda_runtime.h"

namespace cooperative_groups {
struct cluster_group {
  unsigned num_blocks() const { return emu::cluster_size(); }
  unsigned block_rank() const { return emu::cluster_rank(); }
  void barrier_arrive() const { emu::cluster_arrive(); }
  void barrier_wait() const { emu::cluster_wait(); }
  void sync() const { emu::cluster_arrive(), emu::cluster_wait(); }
  template <typename T>
  T* map_shared_rank(T* p, unsigned rank) const {
    return static_cast<T*>(emu::map_rank(p, rank));
  }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
