"""The papers that methods and parts come from, one constant each."""

from anyfleet.papers.paper import Paper

_AISTATS = "International Conference on Artificial Intelligence and Statistics (AISTATS)"
_ICLR = "International Conference on Learning Representations (ICLR)"
_MLSYS = "Conference on Machine Learning and Systems (MLSys)"
_NEURIPS = "Advances in Neural Information Processing Systems (NeurIPS)"
_TWC = "IEEE Transactions on Wireless Communications"

FEDAVG = Paper(
    "mcmahan2017",
    (
        "McMahan, H. Brendan",
        "Moore, Eider",
        "Ramage, Daniel",
        "Hampson, Seth",
        "Agüera y Arcas, Blaise",
    ),
    "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    _AISTATS,
    2017,
)
FEDPROX = Paper(
    "li2020",
    (
        "Li, Tian",
        "Sahu, Anit Kumar",
        "Zaheer, Manzil",
        "Sanjabi, Maziar",
        "Talwalkar, Ameet",
        "Smith, Virginia",
    ),
    "Federated Optimization in Heterogeneous Networks",
    _MLSYS,
    2020,
)
FEDPMT = Paper(
    "wu2025",
    ("Wu, Hongda", "Wang, Ping", "Narayana, C V Aswartha"),
    "Straggler-resilient Federated Learning: Tackling Computation Heterogeneity with Layer-wise "
    "Partial Model Training in Mobile Edge Network",
    "IEEE Transactions on Network Science and Engineering",
    2025,
    "article",
    doi="10.1109/TNSE.2025.3577910",
)
FEDDROP = Paper(
    "wen2022",
    ("Wen, Dingzhu", "Jeon, Ki-Jun", "Huang, Kaibin"),
    "Federated Dropout—A Simple Approach for Enabling Federated Learning on Resource Constrained "
    "Devices",
    "IEEE Wireless Communications Letters",
    2022,
    "article",
)
# Where one random sub-model for each device comes from.
FEDERATED_DROPOUT = Paper(
    "caldas2018",
    ("Caldas, Sebastian", "Konečný, Jakub", "McMahan, H. Brendan", "Talwalkar, Ameet"),
    "Expanding the Reach of Federated Learning by Reducing Client Resource Requirements",
    "arXiv:1812.07210",
    2018,
    "misc",
    url="https://arxiv.org/abs/1812.07210",
)
HETEROFL = Paper(
    "diao2021",
    ("Diao, Enmao", "Ding, Jie", "Tarokh, Vahid"),
    "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous "
    "Clients",
    _ICLR,
    2021,
)
FEDROLEX = Paper(
    "alam2022",
    ("Alam, Samiul", "Liu, Luyang", "Yan, Ming", "Zhang, Mi"),
    "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
    _NEURIPS,
    2022,
)
FJORD = Paper(
    "horvath2021",
    (
        "Horváth, Samuel",
        "Laskaridis, Stefanos",
        "Almeida, Mario",
        "Leontiadis, Ilias",
        "Venieris, Stylianos I.",
        "Lane, Nicholas D.",
    ),
    "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout",
    _NEURIPS,
    2021,
)
# Also of its comparisons: FedSlim (slimmable training in a federation), FedSeq, FedRush.
FEDRESCUE = Paper(
    "zhu2022",
    ("Zhu, Zhuangdi", "Hong, Junyuan", "Drew, Steve", "Zhou, Jiayu"),
    "Resilient and Communication Efficient Learning for Heterogeneous Federated Systems",
    "International Conference on Machine Learning (ICML)",
    2022,
)
SLIMMABLE = Paper(
    "yu2019",
    ("Yu, Jiahui", "Yang, Linjie", "Xu, Ning", "Yang, Jianchao", "Huang, Thomas"),
    "Slimmable Neural Networks",
    _ICLR,
    2019,
)
# The text that the specification follows has no year; the preprint has the same abstract and
# authors.
WHALE = Paper(
    "li-whale",
    (
        "Li, Liang",
        "Geng, Jiaxiang",
        "Su, Huai-an",
        "Qin, Xiaoqi",
        "Hou, Yanzhao",
        "Wang, Hao",
        "Fu, Xin",
        "Pan, Miao",
    ),
    "Accelerating Federated Edge Learning via Wireless and Heterogeneity Aware Subnetwork "
    "Scheduling",
    "earlier version: arXiv:2405.00885",
    kind="misc",
    url="https://arxiv.org/abs/2405.00885",
)
FEDADP = Paper(
    "wu2021",
    ("Wu, Hongda", "Wang, Ping"),
    "Fast-Convergent Federated Learning with Adaptive Weighting",
    "IEEE Transactions on Cognitive Communications and Networking",
    2021,
    "article",
)
# Optimal Aggregation is its first half.
FEDPNS = Paper(
    "wu2022",
    ("Wu, Hongda", "Wang, Ping"),
    "Node Selection Toward Faster Convergence for Federated Learning on Non-IID Data",
    "IEEE Transactions on Network Science and Engineering",
    2022,
    "article",
)
BN2 = Paper(
    "amiri2021",
    (
        "Amiri, Mohammad Mohammadi",
        "Gündüz, Deniz",
        "Kulkarni, Sanjeev R.",
        "Poor, H. Vincent",
    ),
    "Convergence of Update Aware Device Scheduling for Federated Learning at the Wireless Edge",
    _TWC,
    2021,
    "article",
)
# FedAdp, FedPNS and FedPMT at length, and the comparison with BN2.
THESIS = Paper(
    "wu2023",
    ("Wu, Hongda",),
    "Federated Learning for Heterogeneous Networks: Algorithmic and System Design",
    "York University",
    2023,
    "phdthesis",
)
ANYCOST = Paper(
    "li2023",
    (
        "Li, Peichun",
        "Cheng, Guoliang",
        "Huang, Xumin",
        "Kang, Jiawen",
        "Yu, Rong",
        "Wu, Yuan",
        "Pan, Miao",
    ),
    "AnycostFL: Efficient On-Demand Federated Learning over Heterogeneous Edge Devices",
    "IEEE Conference on Computer Communications (INFOCOM)",
    2023,
    doi="10.1109/INFOCOM53939.2023.10229017",
)
STC = Paper(
    "sattler2020",
    ("Sattler, Felix", "Wiedemann, Simon", "Müller, Klaus-Robert", "Samek, Wojciech"),
    "Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data",
    "IEEE Transactions on Neural Networks and Learning Systems",
    2020,
    "article",
)
QSGD = Paper(
    "alistarh2017",
    ("Alistarh, Dan", "Grubic, Demjan", "Li, Jerry", "Tomioka, Ryota", "Vojnovic, Milan"),
    "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    _NEURIPS,
    2017,
)
UVEQFED = Paper(
    "shlezinger2021",
    (
        "Shlezinger, Nir",
        "Chen, Mingzhe",
        "Eldar, Yonina C.",
        "Poor, H. Vincent",
        "Cui, Shuguang",
    ),
    "UVeQFed: Universal Vector Quantization for Federated Learning",
    "IEEE Transactions on Signal Processing",
    2021,
    "article",
)
FEDHQ = Paper(
    "chen2021",
    ("Chen, Shengbo", "Shen, Cong", "Zhang, Lanxue", "Tang, Yuanmin"),
    "Dynamic Aggregation for Heterogeneous Quantization in Federated Learning",
    _TWC,
    2021,
    "article",
)
FEDBUFF = Paper(
    "nguyen2022",
    (
        "Nguyen, John",
        "Malik, Kshitiz",
        "Zhan, Hongyuan",
        "Yousefpour, Ashkan",
        "Rabbat, Mike",
        "Malek, Mani",
        "Huba, Dzmitry",
    ),
    "Federated Learning with Buffered Asynchronous Aggregation",
    _AISTATS,
    2022,
)
FEDADAM = Paper(
    "reddi2021",
    (
        "Reddi, Sashank J.",
        "Charles, Zachary",
        "Zaheer, Manzil",
        "Garrett, Zachary",
        "Rush, Keith",
        "Konečný, Jakub",
        "Kumar, Sanjiv",
        "McMahan, H. Brendan",
    ),
    "Adaptive Federated Optimization",
    _ICLR,
    2021,
)
FEDBN = Paper(
    "li2021",
    ("Li, Xiaoxiao", "Jiang, Meirui", "Zhang, Xiaofei", "Kamp, Michael", "Dou, Qi"),
    "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
    _ICLR,
    2021,
)
FEDAT = Paper(
    "chai2021",
    (
        "Chai, Zheng",
        "Chen, Yujing",
        "Anwar, Ali",
        "Zhao, Liang",
        "Cheng, Yue",
        "Rangwala, Huzefa",
    ),
    "FedAT: A High-Performance and Communication-Efficient Federated Learning System with "
    "Asynchronous Tiers",
    "International Conference for High Performance Computing, Networking, Storage and Analysis "
    "(SC)",
    2021,
)
AT_SCALE = Paper(
    "bonawitz2019",
    (
        "Bonawitz, Keith",
        "Eichner, Hubert",
        "Grieskamp, Wolfgang",
        "Huba, Dzmitry",
        "Ingerman, Alex",
        "Ivanov, Vladimir",
        "Kiddon, Chloé",
        "Konečný, Jakub",
        "Mazzocchi, Stefano",
        "McMahan, H. Brendan",
        "Van Overveldt, Timon",
        "Petrou, David",
        "Ramage, Daniel",
        "Roselander, Jason",
    ),
    "Towards Federated Learning at Scale: System Design",
    _MLSYS,
    2019,
)
# The trimmed mean and the coordinate-wise median.
BYZANTINE = Paper(
    "yin2018",
    ("Yin, Dong", "Chen, Yudong", "Ramchandran, Kannan", "Bartlett, Peter"),
    "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
    "International Conference on Machine Learning (ICML)",
    2018,
)
CLIPPING = Paper(
    "sun2019",
    ("Sun, Ziteng", "Kairouz, Peter", "Suresh, Ananda Theertha", "McMahan, H. Brendan"),
    "Can You Really Backdoor Federated Learning?",
    "arXiv:1911.07963",
    2019,
    "misc",
    url="https://arxiv.org/abs/1911.07963",
)
